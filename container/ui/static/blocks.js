// The KV memory as a map of blocks: one cell for each block, in the colour of its sequence.

import { FADED, begin, drawLegend, palette, sequenceColor } from "./canvas.js";
import { freedLegend } from "./groups.js";

const CELL = { min: 4, max: 38 };
const LEAST_BLOCKS = 512;
export const FREE = -1;
export const KEPT = -2;

export function blocksLegend(list, settings) {
  const isPaged = settings.is_paged;
  const cell = (state) => (context, width, height) => paint(context, state, 2, 0, height, 1);
  const held = { owner: 3, holders: 1, isFilled: true };
  drawLegend(list, [
    ["holds K and V of the sequence of this colour", cell(held)],
    ...(isPaged ? [["shared by several sequences", cell({ ...held, holders: 2 })]] : []),
    ["reserved, still empty", cell({ ...held, isFilled: false })],
    ...(isPaged ? [["free, kept for prompts that begin alike", cell({ owner: KEPT })]] : []),
    ["free", cell({ owner: FREE })],
    ...(settings.groups?.length > 1
      ? [["in layers with a window", cell({ ...held, isRound: true })], freedLegend()]
      : []),
  ]);
}

// Returns the text that says which part of the pool is shown.
export function drawBlocks(canvas, snapshot, settings) {
  const { context, width, height } = begin(canvas);
  const cells = states(snapshot);
  const perCell = drawCells(context, cells, 0, width, height);
  canvas.ariaLabel = describe(snapshot);
  const group = perCell > 1 ? `, ${perCell} in each cell` : "";
  const all = snapshot.num_blocks.toLocaleString("en");
  const shown = cells.length.toLocaleString("en");
  const part = cells.length < snapshot.num_blocks ? `the first ${shown} of ${all} blocks` : `${all} blocks`;
  const whose = settings.executor === "library" ? ", as the strategy counts them" : "";
  const sizes = [...new Set(snapshot.groups.map((each) => each.block_size))].join(" or ");
  return `${part} of ${sizes} tokens${group}${whose}`;
}

// Draws one cell for each state, below `top`. Returns how many states share a cell, if they are many.
export function drawCells(context, cells, top, width, height) {
  const { size, columns, perCell } = layout(width, height - top, cells.length);
  for (let index = 0; index * perCell < cells.length; index += 1) {
    const state = strongest(cells, index * perCell, perCell);
    const [column, row] = [index % columns, Math.floor(index / columns)];
    paint(context, state, column * size, top + row * size, size, size > 5 ? 1 : 0.5);
  }
  return perCell;
}

// Returns the states of the pool's first LEAST_BLOCKS blocks, or of more if later ones are in use.
function states(snapshot) {
  let used = LEAST_BLOCKS;
  const runs = [snapshot.kept_blocks, ...snapshot.sequences.flatMap((sequence) => sequence.tables)];
  for (const [first, length] of runs.flat()) used = Math.max(used, first + length);
  const size = Math.min(snapshot.num_blocks, 2 ** Math.ceil(Math.log2(used)));
  const cells = Array.from({ length: size }, () => ({ owner: FREE, holders: 0, isFilled: false }));
  for (const [first, length] of snapshot.kept_blocks) {
    for (let block = first; block < first + length; block += 1) cells[block].owner = KEPT;
  }
  for (const sequence of snapshot.sequences) {
    sequence.tables.forEach((table, index) => {
      hold(cells, sequence, table, snapshot.groups[index], sequence.freed[index]);
    });
  }
  return cells;
}

// Marks the blocks that a sequence holds in a group, after those that have left the window.
function hold(cells, sequence, table, { block_size: size, window }, numFreed) {
  let position = numFreed * size;
  for (const [first, length] of table) {
    for (let block = first; block < first + length; block += 1) {
      const cell = cells[block];
      if (cell.holders === 0) cell.owner = sequence.id;
      cell.holders += 1;
      cell.isFilled ||= position < sequence.num_computed_tokens;
      cell.isRound = window !== null;
      position += size;
    }
  }
}

function layout(width, height, count) {
  for (let size = CELL.max; size >= CELL.min; size -= 1) {
    const columns = Math.floor(width / size);
    if (columns * Math.floor(height / size) >= count) return { size, columns, perCell: 1 };
  }
  const columns = Math.floor(width / CELL.min);
  const places = columns * Math.floor(height / CELL.min);
  return { size: CELL.min, columns, perCell: Math.ceil(count / places) };
}

// Returns the state to paint for several blocks: that of the block with the most holders. If no
// block is held, it is that of a kept block, or else of a free one.
function strongest(cells, start, count) {
  let best = cells[start];
  for (const cell of cells.slice(start, start + count)) {
    const isStronger = cell.holders > best.holders || (best.owner === FREE && cell.owner === KEPT);
    if (isStronger) best = cell;
  }
  return best;
}

function paint(context, { owner, holders, isFilled, isRound }, x, y, size, gap) {
  const colors = palette();
  const inner = size - gap;
  const special = { [FREE]: colors.free, [KEPT]: colors.kept }[owner];
  context.fillStyle = special ?? sequenceColor(owner);
  if (special === undefined && !isFilled) context.globalAlpha = FADED;
  if (isRound) fillRound(context, x, y, inner);
  else context.fillRect(x, y, inner, inner);
  context.globalAlpha = 1;
  if (holders > 1) {
    const dot = Math.max(1, Math.round(inner * 0.42));
    const shift = (inner - dot) / 2;
    context.fillStyle = colors.text;
    context.fillRect(x + shift, y + shift, dot, dot);
  }
}

function fillRound(context, x, y, size) {
  context.beginPath();
  context.roundRect(x, y, size, size, size / 2);
  context.fill();
}

function describe({ num_held_blocks: held, num_blocks: total, kept_blocks: kept }) {
  const numKept = kept.reduce((sum, [, length]) => sum + length, 0);
  return `${held} of ${total} blocks held by sequences, ${numKept} free ones kept for equal prompts`;
}
