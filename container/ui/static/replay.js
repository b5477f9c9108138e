// The page of a recording: a time line to scrub, the batch and the memory at each moment, and why a
// request waited.

import { request } from "./api.js";
import { batchLegend, drawBatch, mostRows } from "./batch.js";
import { blocksLegend, drawBlocks } from "./blocks.js";
import { explain } from "./explanation.js";
import { drawGroups } from "./groups.js";
import { Futures } from "./futures.js";
import { setNumber, setRounded } from "./numbers.js";
import { nearestRows } from "./rows.js";
import { drawSlots } from "./slots.js";
import { drawLine, lineLegend, shortTime, tickStep } from "./timeline.js";
import { showWhy } from "./why.js";

const WINDOWS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60]; // that the batch can show
const MOST_ROWS = 32; // in the window that is shown first
const BEFORE = 0.6; // share of the window before the moment
const element = (id) => document.getElementById(id);
let recording = null;
let time = 0;
let snapshot = null;
let selected;
let shown = { ids: [], rowHeight: 1 };
let isFetching = false;
let player = null;
const futures = new Futures(element("futures"), element("future"));

async function load(query = "") {
  recording = await json(`ui/replay/recording${query}`);
  recording.rows.forEach((row) => (row.end ??= null));
  const { settings } = recording;
  element("title").textContent = recording.title;
  element("strategy").textContent = settings.batching;
  element("explanation").textContent = explain(settings);
  setStatus(recording.difference ? `the replay differs from the recording, and ends there: ${recording.difference}` : "replayed step for step", recording.difference ? "down" : "live");
  lineLegend(element("line-legend"));
  batchLegend(element("batch-legend"), settings);
  blocksLegend(element("blocks-legend"), settings);
  offerWindows();
  offerChanges();
  const scrub = element("scrub");
  scrub.max = recording.end - recording.begin;
  scrub.step = Math.max(1e-6, scrub.max / 2000);
  goTo(query ? recording.end : busiest());
}

async function readAgain() {
  setStatus("reading the recording…", "");
  try {
    await load("?again=1");
  } catch (error) {
    setStatus(error.message, "down");
  }
}

async function json(path) {
  return (await request(path)).json();
}

function setStatus(text, kind) {
  element("status").textContent = text;
  element("status").className = kind;
}

// When most requests waited: that is what most people want to see first.
function busiest() {
  const { points, begin } = recording;
  return points.reduce((best, point) => (point[2] > best[2] ? point : best), points[0] ?? [begin, 0, 0])[0];
}

function goTo(moment) {
  time = Math.max(recording.begin, Math.min(recording.end, moment));
  element("scrub").value = time - recording.begin;
  draw();
  fetchMoment();
}

// Asks for one moment at a time, and then for the newest.
async function fetchMoment() {
  if (isFetching) return;
  isFetching = true;
  try {
    for (let asked = null; asked !== time; ) {
      asked = time;
      snapshot = await json(`ui/replay/moment?at=${asked}`);
      draw();
    }
  } catch (error) {
    setStatus(`no answer: ${error.message}`, "down");
  } finally {
    isFetching = false;
  }
}

function draw() {
  const { settings } = recording;
  drawLine(element("line"), recording, time);
  setNumber(element("moment"), (time - recording.begin).toFixed(2), "s");
  setRounded(element("tokens-per-second"), tokensPerSecond());
  if (!snapshot) return;
  setNumber(element("running"), snapshot.num_running, `of ${settings.max_sequences}`);
  setNumber(element("queue"), snapshot.num_waiting);
  setRounded(element("kv-use"), (100 * snapshot.num_held_blocks) / snapshot.num_blocks, "%");
  const shownPeriod = period();
  const rows = nearestRows(recording.rows, shownPeriod, mostRows(element("batch")));
  shown = drawBatch(element("batch"), { rows, snapshot }, settings, shownPeriod);
  futures.draw(shownPeriod);
  settings.groups = snapshot.groups;
  element("blocks-range").textContent = drawBlocks(element("blocks"), snapshot, settings);
  element("groups").hidden = settings.groups.length === 1;
  if (settings.groups.length > 1) drawGroups(element("groups"), snapshot, settings);
  drawSlots(element("slots"), snapshot);
}

function tokensPerSecond() {
  const from = Math.max(recording.begin, time - 1);
  const counted = recording.points.filter(([at]) => at > from && at <= time);
  const tokens = counted.reduce((sum, point) => sum + point[4], 0);
  return time > from ? tokens / (time - from) : 0;
}

function windowS() {
  return Number(element("window").value);
}

// Offers the windows that are no longer than the recording. Selects the longest whose rows have room
// for a label.
function offerWindows() {
  const { begin, end, rows, points } = recording;
  const offered = WINDOWS_S.filter((seconds, index) => index === 0 || seconds <= end - begin);
  const most = (seconds) =>
    Math.max(...points.filter((_, index) => index % 8 === 0).map(([at]) => rows.filter((row) => row.arrived < at + seconds && (row.end ?? end) > at).length));
  const fitting = offered.filter((seconds) => most(seconds) <= MOST_ROWS);
  const chosen = fitting.at(-1) ?? offered[0];
  const options = offered.map((seconds) => new Option(`${seconds} s`, seconds, false, seconds === chosen));
  element("window").replaceChildren(...options);
}

function period() {
  const seconds = windowS();
  const latest = Math.max(recording.begin, recording.end - seconds);
  const from = Math.max(recording.begin, Math.min(latest, time - BEFORE * seconds));
  const step = tickStep(seconds, 5);
  const ticks = []; // also after the period, for the futures
  const first = Math.ceil((from - recording.begin) / step - 1e-9);
  for (let tick = first; tick * step <= from + 2 * seconds - recording.begin; tick += 1) {
    ticks.push([recording.begin + tick * step, shortTime(tick * step, step)]);
  }
  return { from, seconds, now: from + seconds, ticks, during: " around this moment", mark: time, selected };
}

async function select(id) {
  selected = id;
  element("request").value = id;
  element("request-name").textContent = `#${id}`;
  draw();
  element("why").replaceChildren("trying which requests were in its way…");
  try {
    const found = await json(`ui/replay/request?id=${id}`);
    if (selected === id) showWhy(element("why"), found, { begin: recording.begin, select: show, goTo, without });
  } catch (error) {
    element("why").replaceChildren(error.status === 404 ? `There is no request ${id}.` : error.message);
  }
}

// Selects another request, and goes to when it was admitted if it is not there at this moment.
function show(id) {
  const row = recording.rows.find((one) => one.id === id);
  if (row && (row.arrived > time || (row.end ?? time) < time)) goTo(row.admitted ?? row.arrived);
  select(id);
}

function offerChanges() {
  const { settings, strategies, options } = recording;
  const names = strategies.map((name) => new Option(name, name, false, name === settings.batching));
  element("fork-batching").replaceChildren(...names);
  element("fork-option").replaceChildren(new Option("no other", ""), ...options.map((name) => new Option(name)));
}

// Computes the futures of a moment. changes: options by name, or `without`, ids of requests.
async function fork(at, changes, name) {
  const note = element("fork-note");
  note.className = "hint";
  note.textContent = "computing both futures…";
  try {
    const query = new URLSearchParams({ at, ...changes });
    const found = await json(`ui/replay/fork?${query}`);
    futures.show(found.futures, ["The recorded options", name], show);
    note.textContent =
      `From ${(futures.at - recording.begin).toFixed(2)} s on, with the batch, the queue and the memory of that moment. ` +
      `Both are computed (${found.quality}).`;
    draw();
  } catch (error) {
    note.className = "error";
    note.textContent = error.message;
  }
}

function forkHere() {
  const [batching, option, value] = ["batching", "option", "value"].map((id) => element(`fork-${id}`).value);
  const changes = batching === recording.settings.batching ? {} : { batching };
  if (option && value) changes[option] = value;
  const name = Object.entries(changes).map(([key, text]) => `${key}=${text}`).join(", ");
  if (name) return fork(time, changes, name);
  element("fork-note").textContent = "Choose another strategy, or an option and its value.";
}

// Computes what happens from the beginning of a cause on without its requests.
function without({ since, blockers }) {
  const ids = blockers.map(({ id }) => id);
  goTo(since);
  fork(since, { without: ids.join() }, `Without ${ids.map((id) => `#${id}`).join(", ")}`);
  element("fork").scrollIntoView({ block: "nearest" });
}

// Returns the beginning of the step before or after the moment.
function step(direction) {
  const { steps } = recording;
  const next = direction > 0 ? steps.find((at) => at > time + 1e-9) : steps.findLast((at) => at < time - 1e-9);
  if (next !== undefined) goTo(next);
}

function play() {
  const stop = () => {
    cancelAnimationFrame(player);
    player = null;
    element("play").textContent = "Play";
  };
  if (player !== null) return stop();
  element("play").textContent = "Stop";
  let last = performance.now();
  const move = (now) => {
    if (time >= recording.end) return stop();
    player = requestAnimationFrame(move);
    goTo(time + (now - last) / 1000);
    last = now;
  };
  player = requestAnimationFrame(move);
}

function dragLine(event) {
  if (!recording || (event.type === "pointermove" && !event.buttons)) return;
  const box = element("line").getBoundingClientRect();
  const share = (event.clientX - box.left) / box.width;
  goTo(recording.begin + share * (recording.end - recording.begin));
}

function clickBatch(event) {
  const box = element("batch").getBoundingClientRect();
  const id = shown.ids[Math.floor((event.clientY - box.top) / shown.rowHeight)];
  if (id !== undefined) select(id);
}

function redraw() {
  if (!recording) return;
  lineLegend(element("line-legend"));
  batchLegend(element("batch-legend"), recording.settings);
  blocksLegend(element("blocks-legend"), recording.settings);
  draw();
}

element("scrub").addEventListener("input", ({ target }) => goTo(recording.begin + Number(target.value)));
element("line").addEventListener("pointerdown", dragLine);
element("line").addEventListener("pointermove", dragLine);
element("batch").addEventListener("click", clickBatch);
element("before").addEventListener("click", () => step(-1));
element("after").addEventListener("click", () => step(1));
element("play").addEventListener("click", play);
element("again").addEventListener("click", readAgain);
element("choose").addEventListener("submit", (event) => {
  event.preventDefault();
  show(Number(element("request").value));
});
element("fork").addEventListener("submit", (event) => {
  event.preventDefault();
  forkHere();
});
element("window").addEventListener("change", redraw);
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
load().catch((error) => setStatus(`no recording: ${error.message}`, "down"));
