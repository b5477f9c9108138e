// Colours and patterns that the pictures of the batch and of the KV memory share. The colours come
// from page.css.

const NAMES = [
  "text", "quiet", "card", "line", "waiting", "prefill", "decode", "preempted", "swapped", "idle",
  "free", "kept", "grid", "seq-lightness",
]; // prettier-ignore
// How strongly reserved blocks that are still empty are painted.
export const FADED = 0.3;
let colors = null;
let hatches = new Map();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colors = null;
  hatches = new Map();
});

export function palette() {
  if (colors === null) {
    const style = getComputedStyle(document.documentElement);
    colors = Object.fromEntries(
      NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
    );
  }
  return colors;
}

// The colour of a sequence. Neighbouring ids differ by the golden angle.
export function sequenceColor(id) {
  return `hsl(${((id * 137.508) % 360).toFixed(0)} 62% ${palette()["seq-lightness"]})`;
}

// Clears the canvas. Returns its context, scaled to CSS pixels, and its size.
export function begin(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// A pattern of diagonal lines.
export function hatch(context, color) {
  let pattern = hatches.get(color);
  if (!pattern) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.strokeStyle = color;
    pen.lineWidth = 1.3;
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift, 6);
      pen.lineTo(shift + 6, 0);
    }
    pen.stroke();
    pattern = context.createPattern(tile, "repeat");
    hatches.set(color, pattern);
  }
  return pattern;
}

// Fills a list with a swatch and a text for each [text, paint(context, width, height)].
export function drawLegend(list, entries) {
  list.replaceChildren(
    ...entries.map(([text, paint]) => {
      const item = document.createElement("li");
      const swatch = document.createElement("canvas");
      swatch.ariaHidden = "true";
      item.append(swatch, text);
      requestAnimationFrame(() => {
        const { context, width, height } = begin(swatch);
        paint(context, width, height);
      });
      return item;
    }),
  );
}
