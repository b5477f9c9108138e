// Numbers with small units, and the limit of the slider for the answers' length.

// Returns half of the context, in steps of 16 tokens, so that the prompt has room; at most 1024.
export function longestAnswer(maxModelLen) {
  return Math.max(16, Math.min(1024, Math.floor(maxModelLen / 32) * 16));
}

export function setNumber(element, value, unit = "") {
  const small = document.createElement("small");
  small.textContent = unit && ` ${unit}`;
  element.replaceChildren(String(value), small);
}

// Shows one decimal for values below ten.
export function setRounded(element, value, unit) {
  setNumber(element, value.toFixed(value < 10 ? 1 : 0), unit);
}

// seconds: null if they are not known.
export function setSeconds(element, seconds) {
  if (seconds === null) setNumber(element, "–");
  else if (seconds < 1) setNumber(element, (seconds * 1000).toFixed(0), "ms");
  else setNumber(element, seconds.toFixed(1), "s");
}
