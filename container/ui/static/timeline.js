// The time line of a whole recording: sequences that run and wait, and the KV memory in use.

import { begin, drawLegend, hatch, palette } from "./canvas.js";

const AXIS = 18;

export function lineLegend(list) {
  drawLegend(list, [
    ["running", (context, width, height) => fill(context, palette().decode, 0, 0, width, height)],
    ["waiting", (context, width, height) => fill(context, hatch(context, palette().waiting), 0, 0, width, height)],
    ["KV memory in use", (context, width, height) => fill(context, palette().swapped, 0, height / 2 - 1, width, 2)],
  ]);
}

// recording: begin and end in seconds, and points of [time, running, waiting, held blocks, tokens].
export function drawLine(canvas, recording, time) {
  const { context, width, height } = begin(canvas);
  const { begin: from, end, points, settings } = recording;
  const scale = width / Math.max(1e-9, end - from);
  const x = (at) => (at - from) * scale;
  const bottom = height - AXIS;
  const most = Math.max(1, ...points.map(([, running, waiting]) => running + waiting));
  points.forEach(([at, running, waiting], index) => {
    const left = x(at);
    const right = index + 1 < points.length ? x(points[index + 1][0]) : x(end);
    // After a gap nothing is drawn: the engine was idle.
    const wide = Math.max(1, Math.min(right - left, width / 100));
    const high = (running / most) * bottom;
    fill(context, palette().decode, left, bottom - high, wide, high);
    const queue = (waiting / most) * bottom;
    fill(context, hatch(context, palette().waiting), left, bottom - high - queue, wide, queue);
  });
  drawUse(context, points, settings.num_blocks, x, bottom);
  drawTicks(context, recording, x, width, height);
  fill(context, palette().text, Math.round(x(time)) - 1, 0, 2, bottom);
  canvas.ariaLabel = `${(end - from).toFixed(1)} seconds, at most ${most} requests at once; now at ${(time - from).toFixed(2)} s`;
}

// Steps that are pleasant to read, so that at most `most` of them fit.
export function tickStep(seconds, most) {
  const raw = seconds / most;
  const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1e-6)));
  return power * [1, 2, 5, 10].find((digit) => digit * power >= raw);
}

export function shortTime(seconds, step) {
  const digits = step >= 1 ? 0 : Math.min(4, Math.ceil(-Math.log10(step)));
  return `${seconds.toFixed(digits)} s`;
}

function drawUse(context, points, numBlocks, x, bottom) {
  context.strokeStyle = palette().swapped;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const [at, , , held] of points) context.lineTo(x(at), bottom - (held / numBlocks) * (bottom - 2));
  context.stroke();
}

function drawTicks(context, { begin: from, end }, x, width, height) {
  const step = tickStep(end - from, Math.max(2, width / 90));
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "bottom";
  context.fillStyle = palette().quiet;
  for (let at = 0; at <= end - from; at += step) {
    const place = x(from + at);
    context.textAlign = place < 20 ? "left" : place > width - 20 ? "right" : "center";
    context.fillText(shortTime(at, step), place, height - 2);
  }
}

function fill(context, style, x, y, width, height) {
  context.fillStyle = style;
  context.fillRect(x, y, width, height);
}
