// The batch as a Gantt chart: one row for each sequence, time to the right.

import { begin, drawLegend, hatch, palette, sequenceColor } from "./canvas.js";
import { WINDOW_S } from "./history.js";

const GUTTER = 62;
const AXIS = 20;
const ROW = { min: 6, max: 24 };
const MIN_BAR = 2;

const PHASES = {
  waiting: "waiting in the queue",
  prefill: "prefill: reading the prompt",
  decode: "decode: writing, a token per step",
  preempted: "preempted: gave its memory back",
  swapped: "swapped to host memory",
  idle: "place stays empty until the batch ends",
};

// Returns the phases that the strategy's requests may have.
function shownPhases(settings) {
  return [
    "waiting",
    ...(isWhole(settings) ? [] : ["prefill"]),
    "decode",
    ...(settings.batching === "dynamic" ? ["idle"] : []),
    ...(settings.is_paged ? ["preempted", "swapped"] : []),
  ];
}

export function batchLegend(list, settings) {
  drawLegend(
    list,
    shownPhases(settings).map((phase) => [
      phaseName(phase, settings),
      (context, width, height) => bar(context, phase, 0, 0, width, height),
    ]),
  );
}

function phaseName(phase, settings) {
  if (phase !== "decode") return PHASES[phase];
  if (isWhole(settings)) return "running: transformers computes the whole answer";
  return settings.proposer ? "decode: writing, one or several tokens per step" : PHASES.decode;
}

// The time axis of a chart, in the engine's seconds: it starts at `from` and is `seconds` long, and
// bars are drawn up to `now`. `ticks` are [time, text]. If given, `mark` is a time with a line, and
// `selected` the id of a row that stands out.
export function lastSeconds(history, localNow) {
  const now = history.time(localNow);
  const ticks = [0, 5, 10, 15, 20].map((age) => [now - age, age === 0 ? "now" : `−${age} s`]);
  const during = ` in the last ${WINDOW_S} seconds`;
  return { from: now - WINDOW_S, seconds: WINDOW_S, now, ticks, during };
}

// Returns the ids of the rows, from the top, and their height.
export function drawBatch(canvas, history, settings, period) {
  const { context, width, height } = begin(canvas);
  const { from: left, now } = period;
  const scale = (width - GUTTER) / period.seconds;
  const x = (time) => GUTTER + (Math.max(left, Math.min(now, time)) - left) * scale;
  drawAxis(context, width, height, period);
  if (period.mark !== undefined) drawMark(context, x(period.mark), height);
  const rows = visibleRows(history, left, height - AXIS);
  const rowHeight = Math.max(ROW.min, Math.min(ROW.max, (height - AXIS) / Math.max(1, rows.length)));
  const batchEnds = settings.batching === "dynamic" ? endsOfBatches(history, now) : null;
  rows.forEach((row, index) => {
    const top = index * rowHeight;
    if (row.id === period.selected) drawSelected(context, top, width, rowHeight);
    for (const [phase, from, to] of spans(row, now, settings, batchEnds)) {
      if (to < left) continue;
      const [start, end] = [x(from), x(to)];
      const least = phase === "prefill" ? MIN_BAR : 0;
      bar(context, phase, start, top + rowHeight * 0.14, Math.max(least, end - start), rowHeight * 0.72);
    }
    if (rowHeight >= 11) labelRow(context, row, top, rowHeight, x, now);
  });
  if (!rows.length) drawEmpty(context, width, height, period);
  canvas.ariaLabel = describe(rows, history.snapshot, period);
  return { ids: rows.map(({ id }) => id), rowHeight };
}

// The most rows that a chart of this height can show.
export function mostRows(canvas) {
  return Math.floor((canvas.clientHeight - AXIS) / ROW.min);
}

// The library executor writes whole answers in one step, so prefill and decode are not told apart.
function isWhole(settings) {
  return settings.executor === "library";
}

function visibleRows(history, left, height) {
  const rows = [...history.rows.values()].filter((row) => row.end === null || row.end > left);
  rows.sort((a, b) => a.arrived - b.arrived || a.id - b.id);
  const most = Math.floor(height / ROW.min);
  while (rows.length > most) {
    const ended = rows.findIndex((row) => row.end !== null);
    rows.splice(ended < 0 ? rows.length - 1 : ended, 1);
  }
  return rows;
}

// Returns [phase, from, to] in the order of painting: later ones cover earlier ones.
function spans(row, now, settings, batchEnds) {
  const end = row.end ?? now;
  const admitted = row.admitted ?? end;
  const first = isWhole(settings) ? admitted : (row.first ?? end);
  const list = [
    ["waiting", row.arrived, admitted],
    ["decode", first, end],
    ["prefill", admitted, first],
    ...row.breaks.map(({ phase, from, to }) => [phase, from, to ?? end]),
  ];
  const batchEnd = row.end !== null && row.admitted !== null && batchEnds?.get(row.admitted);
  if (batchEnd) list.push(["idle", row.end, batchEnd]);
  return list.filter(([, from, to]) => to > from);
}

// The requests of one batch are admitted at the same time.
function endsOfBatches(history, now) {
  const ends = new Map();
  for (const { admitted, end } of history.rows.values()) {
    if (admitted !== null) ends.set(admitted, Math.max(ends.get(admitted) ?? 0, end ?? now));
  }
  return ends;
}

function bar(context, phase, x, y, width, height) {
  const colors = palette();
  if (phase === "idle") {
    context.strokeStyle = colors.idle;
    context.strokeRect(x + 0.5, y + 0.5, Math.max(0, width - 1), height - 1);
    return;
  }
  context.fillStyle = phase === "waiting" ? hatch(context, colors.waiting) : colors[phase];
  context.fillRect(x, y, width, height);
}

function labelRow(context, row, top, rowHeight, x, now) {
  const middle = top + rowHeight / 2;
  const size = Math.min(12, rowHeight - 2);
  context.fillStyle = sequenceColor(row.id);
  context.fillRect(2, middle - 4, 8, 8);
  context.font = `${size}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillStyle = palette().quiet;
  context.fillText(`#${row.id}`, 15, middle + 0.5);
  const from = x(row.first ?? now);
  const to = x(row.end ?? now);
  const isDone = row.end !== null && row.end <= now;
  const note = isDone ? `${(row.end - row.arrived).toFixed(1)} s` : `${row.generated} tokens`;
  if (to - from > context.measureText(note).width + 12) {
    context.fillStyle = "#ffffff";
    context.textAlign = "right";
    context.fillText(note, to - 6, middle + 0.5);
  }
}

function drawAxis(context, width, height, { from, seconds, ticks }) {
  const colors = palette();
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "bottom";
  context.lineWidth = 1;
  for (const [time, text] of ticks) {
    const share = (time - from) / seconds;
    if (share > 1) break;
    const x = Math.round(GUTTER + share * (width - GUTTER)) - 0.5;
    context.strokeStyle = colors.grid;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, height - AXIS);
    context.stroke();
    context.fillStyle = colors.quiet;
    context.textAlign = share > 0.97 ? "right" : share < 0.03 ? "left" : "center";
    context.fillText(text, x, height - 3);
  }
}

function drawMark(context, x, height) {
  context.fillStyle = palette().text;
  context.fillRect(Math.round(x) - 1, 0, 1, height - AXIS);
}

function drawSelected(context, top, width, rowHeight) {
  context.fillStyle = palette().line;
  context.fillRect(0, top, width, rowHeight);
}

function drawEmpty(context, width, height, { during }) {
  context.font = "14px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = palette().quiet;
  context.fillText(`No requests${during || " yet"}`, (GUTTER + width) / 2, (height - AXIS) / 2);
}

function describe(rows, snapshot, { during }) {
  if (!snapshot) return rows.length ? `${rows.length} requests${during}` : "No requests";
  const { num_running: running, num_waiting: waiting } = snapshot;
  return `${rows.length} requests${during}; ${running} running, ${waiting} waiting`;
}
