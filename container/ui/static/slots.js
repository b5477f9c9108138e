// The slots of states, of models whose layers keep one of each sequence: one cell for each slot.

import { FREE, KEPT, drawCells } from "./blocks.js";
import { begin, palette } from "./canvas.js";

const TITLE = 18;

// Draws the slots in the colours of the blocks, or hides the canvas if there are none.
export function drawSlots(canvas, snapshot) {
  canvas.hidden = snapshot.num_states === 0;
  if (canvas.hidden) return;
  const { context, width, height } = begin(canvas);
  const cells = slots(snapshot);
  const text = describe(cells);
  context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  context.fillStyle = palette().quiet;
  context.fillText(text, 0, 12, width);
  drawCells(context, cells, TITLE, width, height);
  canvas.ariaLabel = text;
}

// A sequence holds the slot of its state and, while drafts are verified, empty ones for the next states.
function slots(snapshot) {
  const cells = Array.from({ length: snapshot.num_states }, () => ({ owner: FREE, holders: 0, isFilled: false }));
  for (const [first, length] of snapshot.kept_states) {
    for (let slot = first; slot < first + length; slot += 1) cells[slot].owner = KEPT;
  }
  for (const { id, states, num_computed_tokens: numComputed } of snapshot.sequences) {
    states.forEach((slot, index) => {
      const cell = cells[slot];
      if (cell.holders === 0) cell.owner = id;
      cell.holders += 1;
      cell.isFilled ||= index === 0 && numComputed > 0;
    });
  }
  return cells;
}

function describe(cells) {
  const held = cells.filter(({ holders }) => holders > 0).length;
  const kept = cells.filter(({ owner }) => owner === KEPT).length;
  return `states in ${held} of ${cells.length} slots, ${kept} kept for prompts that begin alike`;
}
