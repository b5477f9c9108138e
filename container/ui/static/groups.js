// What each sequence holds in the cache groups: one picture for each kind of layer, one row for each
// sequence, from its first token to its last. Where a window has moved on, the blocks are freed.

import { FADED, begin, palette, sequenceColor } from "./canvas.js";

const TITLE = 18;
const GAP = 24;
const ROW = { min: 3, max: 12 };

export function freedLegend() {
  const paint = (context, width, height) => drawFreed(context, 0, 2, width, height - 4);
  return ["freed, as the window has moved on", paint];
}

export function drawGroups(canvas, snapshot, settings) {
  const { context, width, height } = begin(canvas);
  const kinds = kindsOf(snapshot.groups);
  const rows = rowsOf(snapshot, kinds, settings.is_paged);
  const column = (width - GAP * (kinds.length - 1)) / kinds.length;
  const most = Math.floor((height - TITLE) / ROW.min);
  const rowHeight = Math.min(ROW.max, (height - TITLE) / Math.max(1, Math.min(rows.length, most)));
  const ends = rows.flatMap((row) => row.spans.map((span) => span.end));
  const scale = column / Math.max(1, ...ends);
  context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  kinds.forEach((kind, index) => {
    const left = index * (column + GAP);
    context.fillStyle = palette().quiet;
    context.fillText(title(kind), left, 12, column);
    rows.slice(0, most).forEach(({ id, spans }, row) => {
      drawRow(context, id, spans[index], left, TITLE + row * rowHeight, scale, rowHeight);
    });
  });
  canvas.ariaLabel = kinds.map((kind, index) => describe(kind, rows, index)).join("; ");
}

// Layers of one kind may be in several groups, whose block tables are equally long. The widest windows
// come first.
function kindsOf(groups) {
  const kinds = new Map();
  groups.forEach((group, index) => {
    const key = `${group.window} ${group.block_size}`;
    const kind = kinds.get(key) ?? { ...group, index, num_layers: 0, num_groups: 0 };
    kind.num_layers += group.num_layers;
    kind.num_groups += 1;
    kinds.set(key, kind);
  });
  return [...kinds.values()].sort((a, b) => (b.window ?? Number.MAX_VALUE) - (a.window ?? Number.MAX_VALUE));
}

// Returns the sequences that hold blocks, and where their blocks of each kind lie, in tokens.
function rowsOf(snapshot, kinds, isPaged) {
  const holding = snapshot.sequences.filter(({ tables }) => tables.some((table) => table.length));
  return holding.map((sequence) => ({
    id: sequence.id,
    spans: kinds.map((kind) => spanOf(sequence, kind, isPaged)),
  }));
}

// Without paging, a window's blocks are a ring: the newest tokens take the place of the oldest.
function spanOf({ tables, freed, num_computed_tokens: numComputed }, { index, block_size: size }, isPaged) {
  const count = tables[index].reduce((sum, [, length]) => sum + length, 0);
  const written = Math.ceil(numComputed / size);
  const first = isPaged ? freed[index] : Math.max(0, written - count);
  return { start: first * size, filled: Math.max(first * size, numComputed), end: (first + count) * size };
}

function drawRow(context, id, { start, filled, end }, left, y, scale, rowHeight) {
  const height = rowHeight - Math.min(2, rowHeight / 3);
  if (start > 0) drawFreed(context, left, y, start * scale, height);
  context.fillStyle = sequenceColor(id);
  context.fillRect(left + start * scale, y, (Math.min(filled, end) - start) * scale, height);
  context.globalAlpha = FADED;
  context.fillRect(left + filled * scale, y, Math.max(0, end - filled) * scale, height);
  context.globalAlpha = 1;
}

function drawFreed(context, x, y, width, height) {
  context.strokeStyle = palette().idle;
  context.strokeRect(x + 0.5, y + 0.5, Math.max(0, width - 1), Math.max(0, height - 1));
}

function title({ num_layers: layers, window, num_groups: groups }) {
  const which = `${layers} ${layers === 1 ? "layer reads" : "layers read"}`;
  const tokens = window === null ? "all tokens" : `${window.toLocaleString("en")} tokens`;
  return `${which} ${tokens}${groups > 1 ? `, in ${groups} groups` : ""}`;
}

function describe(kind, rows, index) {
  const sum = (value) => rows.reduce((total, { spans }) => total + value(spans[index]), 0);
  const held = sum(({ start, end }) => end - start) / kind.block_size;
  const freed = sum(({ start }) => start) / kind.block_size;
  return `${title(kind)}: ${held} blocks held in each group, ${freed} freed`;
}
