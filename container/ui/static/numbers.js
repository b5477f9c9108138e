// Numbers with small units.

export function setNumber(element, value, unit = "") {
  const small = document.createElement("small");
  small.textContent = unit && ` ${unit}`;
  element.replaceChildren(String(value), small);
}

// seconds: null if they are not known.
export function setSeconds(element, seconds) {
  if (seconds === null) setNumber(element, "–");
  else if (seconds < 1) setNumber(element, (seconds * 1000).toFixed(0), "ms");
  else setNumber(element, seconds.toFixed(1), "s");
}
