// Speculation: how many tokens a step gives, how many drafts were right, and why steps have none.

import { begin, drawLegend, hatch, palette } from "./canvas.js";
import { WINDOW_S } from "./history.js";

const GUTTER = 42;
const AXIS = 18;
const STRIP = 7; // height of the strip that shows which steps had drafts
const MEAN_S = 1; // what is shown is a mean over this time
const PROPOSERS = {
  ngram: "text before",
  suffix: "recent text",
  draft_model: "a draft model",
  mtp: "the model's own layer",
  eagle3: "an EAGLE-3 head",
};
const REASONS = {
  compared: "they seem to pay, and steps without are timed to see whether they do",
  cost: "with so many requests, a step with drafts costs more than they can give",
  unlikely: "those at hand are not likely enough to be right",
  not_found: "nothing suggests what comes next",
  requests: "these requests have penalties, grammars or beams",
  room: "prompts or held blocks leave no room",
  failed: "an error has ended them; see the log",
};

const sum = (numbers) => Object.values(numbers).reduce((total, number) => total + number, 0);

// The counters of the last WINDOW_S seconds. They are those of the engine's last heartbeat.
export class Drafts {
  constructor() {
    this.reset();
  }

  reset() {
    this.points = [];
  }

  // now: the engine's time. drafts: totals since its start, by name and label.
  update(now, drafts) {
    if (!drafts.steps) return; // no heartbeat yet
    const { decodes, num_draft_tokens: tokens, num_accepted_tokens: accepted, steps } = drafts;
    const point = { now, decodes: decodes[""], tokens: tokens[""], accepted: accepted[""], steps };
    if (this.points.at(-1)?.now >= now) this.reset(); // another engine
    this.points.push(point);
    while (this.points[1]?.now < now - WINDOW_S - MEAN_S) this.points.shift();
  }

  // Means over the time before a point. Each is null where there is nothing to divide by.
  at(index) {
    const to = this.points[index];
    const from = this.points.find(({ now }) => now >= to.now - MEAN_S) ?? to;
    const steps = Object.fromEntries(Object.keys(to.steps).map((key) => [key, to.steps[key] - from.steps[key]]));
    const numSteps = sum(steps);
    const [decodes, tokens, accepted] = ["decodes", "tokens", "accepted"].map((key) => to[key] - from[key]);
    return {
      now: to.now,
      tokensPerStep: decodes > 0 ? 1 + accepted / decodes : null,
      right: tokens > 0 ? accepted / tokens : null,
      draftsPerStep: numSteps > 0 ? tokens / numSteps : null,
      drafted: numSteps > 0 ? (steps.drafted + (steps.tried ?? 0)) / numSteps : null,
      steps,
    };
  }

  last() {
    return this.points.length ? this.at(this.points.length - 1) : null;
  }
}

export function nameOf({ proposer, num_drafts: count }) {
  return `up to ${count} drafts from ${PROPOSERS[proposer] ?? proposer}`;
}

// Says what the last steps decided.
export function decision(mean) {
  if (mean === null || mean.drafted === null) return "No request decodes now.";
  const { drafted: _, tried: __, ...others } = mean.steps;
  const [why, count] = Object.entries(others).reduce((a, b) => (b[1] > a[1] ? b : a));
  const reason = REASONS[why] ?? why;
  if (mean.drafted === 0) return `Steps have no drafts now: ${reason}.`;
  const share = `${(100 * mean.drafted).toFixed(0)} % of the steps have drafts now`;
  return count ? `${share}. Where they have none: ${reason}.` : "All steps have drafts now.";
}

export function draftsLegend(list) {
  const line = (color) => (context, width, height) => fill(context, palette()[color], 0, height / 2 - 1, width, 2);
  drawLegend(list, [
    ["tokens a step", line("decode")],
    ["drafts that were right", line("swapped")],
    ["steps with drafts", (context, width, height) => fill(context, palette().prefill, 0, 2, width, height - 4)],
    ["without", (context, width, height) => fill(context, hatch(context, palette().waiting), 0, 2, width, height - 4)],
  ]);
}

// now: the engine's time at the right end.
export function drawDrafts(canvas, drafts, { num_drafts: count }, now) {
  const { context, width, height } = begin(canvas);
  const [left, right, bottom] = [GUTTER, width - GUTTER, height - AXIS - STRIP - 3];
  const x = (time) => right - ((now - time) / WINDOW_S) * (right - left);
  const means = drafts.points.map((_, index) => drafts.at(index)).filter((mean) => mean.now >= now - WINDOW_S);
  drawGrid(context, count, { left, right, bottom, height });
  means.slice(1).forEach((mean, index) => {
    if (mean.drafted === null) return;
    const [from, to] = [x(means[index].now), x(mean.now) + 0.5];
    fill(context, hatch(context, palette().waiting), from, bottom + 3, to - from, STRIP);
    context.globalAlpha = mean.drafted;
    fill(context, palette().prefill, from, bottom + 3, to - from, STRIP);
    context.globalAlpha = 1;
  });
  drawCurve(context, palette().swapped, means.map(({ now: time, right: share }) => [x(time), share]), bottom);
  const heights = means.map(({ now: time, tokensPerStep }) => [x(time), tokensPerStep && (tokensPerStep - 1) / count]);
  drawCurve(context, palette().decode, heights, bottom);
  canvas.ariaLabel = describe(drafts.last());
}

// points: places and heights from 0 to 1, or null where the curve is broken.
function drawCurve(context, color, points, bottom) {
  context.strokeStyle = color;
  context.lineWidth = 1.8;
  context.beginPath();
  points.forEach(([x, share], index) => {
    if (share === null) return;
    const y = 1 + (1 - share) * (bottom - 2);
    if (index && points[index - 1][1] !== null) context.lineTo(x, y);
    else context.moveTo(x, y);
  });
  context.stroke();
}

// Labels: tokens a step on the left, the share of right drafts on the right.
function drawGrid(context, count, { left, right, bottom, height }) {
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 1;
  context.strokeStyle = palette().grid;
  context.fillStyle = palette().quiet;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(1 + (1 - share) * (bottom - 2)) + 0.5;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.textBaseline = share === 1 ? "top" : share ? "middle" : "bottom";
    context.textAlign = "right";
    context.fillText(`${+(1 + share * count).toFixed(1)}`, left - 6, y);
    context.textAlign = "left";
    context.fillText(`${100 * share} %`, right + 5, y);
  }
  context.textBaseline = "bottom";
  for (const age of [0, 5, 10, 15, 20]) {
    const place = right - (age / WINDOW_S) * (right - left);
    context.textAlign = age === 0 ? "right" : age === WINDOW_S ? "left" : "center";
    context.fillText(age ? `−${age} s` : "now", place, height - 2);
  }
}

function describe(mean) {
  if (mean === null || mean.tokensPerStep === null) return "No drafts: no request decodes";
  const right = mean.right === null ? "no drafts" : `${(100 * mean.right).toFixed(0)} % of the drafts right`;
  return `${mean.tokensPerStep.toFixed(2)} tokens a step, ${right}`;
}

function fill(context, style, x, y, width, height) {
  context.fillStyle = style;
  context.fillRect(x, y, width, height);
}
