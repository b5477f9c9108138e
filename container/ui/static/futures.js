// Two futures of a moment of a recording, side by side: their figures, and their batches at the moment
// that the page shows.

import { batchLegend, drawBatch, mostRows } from "./batch.js";
import { nearestRows } from "./rows.js";
import { setNumber } from "./numbers.js";

const FIGURES = [
  ["requests_per_s", "Requests/s", 1, ""],
  ["tokens_per_s", "Tokens/s", 1, ""],
  ["first_token_p50", "First token, p50", 1000, "ms"],
  ["first_token_p99", "First token, p99", 1000, "ms"],
  ["wait_p50", "In the queue, p50", 1000, "ms"],
  ["wait_p99", "In the queue, p99", 1000, "ms"],
  ["inter_token_p50", "Between tokens", 1000, "ms"],
  ["num_preemptions", "Preemptions", 1, ""],
];

export class Futures {
  // place: where the panels go; template: a panel.
  constructor(place, template) {
    this.place = place;
    this.template = template;
    this.panels = [];
  }

  // names: of both futures; select: called with the id of a row that is clicked.
  show(futures, names, select) {
    this.at = futures[0].at;
    this.panels = futures.map((future, index) => {
      const root = this.template.content.firstElementChild.cloneNode(true);
      const panel = { future, root, shown: { ids: [], rowHeight: 1 } };
      root.querySelector(".name").textContent = names[index];
      root.querySelector(".state").textContent = stateOf(future);
      showFigures(root.querySelector("dl"), future.figures, index > 0 ? futures[0].figures : null);
      root.querySelector(".batch").addEventListener("click", ({ offsetY }) => {
        const id = panel.shown.ids[Math.floor(offsetY / panel.shown.rowHeight)];
        if (id !== undefined) select(id);
      });
      return panel;
    });
    this.place.replaceChildren(...this.panels.map(({ root }) => root));
  }

  // period: what the page's own batch shows. The futures show the same, or what follows the fork.
  draw(period) {
    const from = Math.max(period.from, this.at);
    const moved = { ...period, from, now: from + period.seconds, mark: Math.max(period.mark, this.at), during: "" };
    moved.ticks = period.ticks.filter(([at]) => at >= from);
    for (const panel of this.panels) {
      const canvas = panel.root.querySelector(".batch");
      const rows = nearestRows(panel.future.rows, moved, mostRows(canvas));
      panel.shown = drawBatch(canvas, { rows, snapshot: null }, panel.future.settings, moved);
      const { settings, num_preempted } = panel.future;
      batchLegend(panel.root.querySelector(".batch-legend"), { ...settings, is_paged: settings.is_paged || num_preempted > 0 });
    }
  }
}

// Says what the future could not take over from its moment.
function stateOf({ num_refused, keeps_memory, num_preempted }) {
  const notes = [];
  if (!keeps_memory) notes.push(`begins with an empty memory: the ${num_preempted} sequences that ran are computed again`);
  if (num_refused) notes.push(`${num_refused} requests do not fit and were refused`);
  return notes.join("; ");
}

function showFigures(list, figures, others) {
  list.replaceChildren(
    ...FIGURES.map(([name, title, scale, unit]) => {
      const pair = document.createElement("div");
      const [term, value] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = title;
      const number = figures[name];
      setNumber(value, number === undefined ? "–" : short(number * scale), unit);
      const note = document.createElement("dd");
      note.className = "change";
      note.textContent = others ? change(number, others[name]) : "\u00a0";
      pair.append(term, value, note);
      return pair;
    }),
  );
}

function change(value, before) {
  if (!(before > 0) || value === undefined) return "";
  const percent = 100 * (value / before - 1);
  return Math.abs(percent) < 0.5 ? "the same" : `${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(0)} %`;
}

function short(value) {
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 2 });
}
