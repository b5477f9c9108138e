// The live page: connects to the server's events and draws what they say.

import { events, onUnauthorized, setKey } from "./api.js";
import { batchLegend, drawBatch, lastSeconds } from "./batch.js";
import { blocksLegend, drawBlocks } from "./blocks.js";
import { Chat } from "./chat.js";
import { decision, Drafts, draftsLegend, drawDrafts, nameOf } from "./drafts.js";
import { explain } from "./explanation.js";
import { drawGroups } from "./groups.js";
import { History } from "./history.js";
import { longestAnswer, setNumber, setRounded, setSeconds } from "./numbers.js";
import { drawSlots } from "./slots.js";

const RETRY_MS = 1000;
const FRAME_MS = 45;
const element = (id) => document.getElementById(id);
const history = new History();
const drafts = new Drafts();
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
let settings = null;
let chat = null;

const localNow = () => performance.now() / 1000;

function setStatus(text, kind = "") {
  element("status").textContent = text;
  element("status").className = kind;
}

function onEngine(data) {
  settings = data;
  history.reset();
  drafts.reset();
  element("model").textContent = `${data.model_name} · ${data.device}, ${data.dtype}`;
  showCopies(data);
  element("strategy").textContent = data.batching;
  element("explanation").textContent = explain(data);
  element("recorded").hidden = !data.is_recorded;
  element("speculation").hidden = !data.proposer;
  element("proposer").textContent = nameOf(data);
  drawLegends();
  const slider = element("max-tokens");
  slider.max = longestAnswer(data.max_model_len);
  slider.dispatchEvent(new Event("input"));
  chat ??= new Chat(
    {
      ask: element("ask"), text: element("text"), messages: element("messages"),
      send: element("send"), burst: element("burst"), stop: element("stop"),
      clear: element("clear"), maxTokens: slider, temperature: element("temperature"),
    }, // prettier-ignore
    data.chat,
  );
  setStatus("live", "live");
}

// Each of several copies of the model has its own engine; the page shows one of them.
function showCopies({ copy, copies = 1 }) {
  element("copies").hidden = copies === 1;
  const links = Array.from({ length: copies }, (_, number) => {
    const link = document.createElement("a");
    link.href = `?copy=${number}`;
    link.textContent = number;
    if (number === copy) link.ariaCurrent = "page";
    return link;
  });
  element("copies").replaceChildren("Shows copy", ...links, `of ${copies}; requests go to all`);
}

function onSnapshot({ snapshot, counters }) {
  history.update(snapshot, counters, localNow());
  const rate = history.tokensPerSecond();
  setRounded(element("tokens-per-second"), rate);
  setSeconds(element("first-token"), history.firstToken());
  setNumber(element("running"), snapshot.num_running, `of ${settings.max_sequences}`);
  setNumber(element("queue"), snapshot.num_waiting);
  const use = (100 * snapshot.num_held_blocks) / snapshot.num_blocks;
  setRounded(element("kv-use"), use, "%");
  showBlocks(snapshot);
  drafts.update(snapshot.now, counters.drafts);
  if (settings.proposer) showDrafts(snapshot.now);
  if (isCalm.matches) drawBatch(element("batch"), history, settings, lastSeconds(history, localNow()));
}

// A model whose layers are in several cache groups gets a second picture, one with states another.
function showBlocks(snapshot) {
  const isNew = settings.groups?.length !== snapshot.groups.length;
  settings.groups = snapshot.groups;
  if (isNew) blocksLegend(element("blocks-legend"), settings);
  element("blocks-range").textContent = drawBlocks(element("blocks"), snapshot, settings);
  element("groups").hidden = snapshot.groups.length === 1;
  if (snapshot.groups.length > 1) drawGroups(element("groups"), snapshot, settings);
  drawSlots(element("slots"), snapshot);
}

function showDrafts(now) {
  const mean = drafts.last();
  element("decision").textContent = decision(mean);
  showMean(element("tokens-per-step"), mean?.tokensPerStep);
  showMean(element("right-drafts"), mean?.right, 100, "%");
  showMean(element("drafts-per-step"), mean?.draftsPerStep);
  drawDrafts(element("drafts"), drafts, settings, now);
}

function showMean(target, mean, factor = 1, unit = "") {
  if (mean == null) setNumber(target, "–");
  else setRounded(target, factor * mean, unit);
}

function onEvent({ event, data }) {
  if (event === "engine") onEngine(data);
  if (event === "snapshot" && settings) onSnapshot(data);
  if (event === "down") setStatus(data.reason, "down");
}

function untilVisible() {
  return new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", () => resolve(untilVisible()), { once: true });
  });
}

// Watches while the page is visible, and connects again when the stream ends.
async function watch() {
  for (;;) {
    await untilVisible();
    const controller = new AbortController();
    const stop = () => document.hidden && controller.abort();
    document.addEventListener("visibilitychange", stop);
    try {
      const path = `ui/events${location.search}`; // the address may name a copy
      for await (const event of events(path, { signal: controller.signal })) onEvent(event);
      setStatus("the server has closed the stream; connecting…", "down");
    } catch (error) {
      if (error.name !== "AbortError") setStatus(`no connection: ${error.message}`, "down");
    } finally {
      document.removeEventListener("visibilitychange", stop);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

// On a CPU the browser shares the cores with the engine, so it draws no more than it has to.
function animate(time, lastDrawn = -Infinity) {
  const isDue = time - lastDrawn > FRAME_MS;
  if (isDue && settings && !isCalm.matches) {
    drawBatch(element("batch"), history, settings, lastSeconds(history, localNow()));
  }
  requestAnimationFrame((next) => animate(next, isDue ? time : lastDrawn));
}

function drawLegends() {
  batchLegend(element("batch-legend"), settings);
  blocksLegend(element("blocks-legend"), settings);
  if (settings.proposer) draftsLegend(element("drafts-legend"));
}

function redraw() {
  if (!settings) return;
  drawLegends();
  if (!history.snapshot) return;
  showBlocks(history.snapshot);
  if (settings.proposer) showDrafts(history.snapshot.now);
}

for (const [id, unit] of [["max-tokens", " tokens"], ["temperature", ""]]) {
  const show = () => (element(`${id}-value`).textContent = element(id).value + unit);
  element(id).addEventListener("input", show);
  show();
}
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(element("key").value);
  element("key-form").hidden = true;
});
onUnauthorized(() => (element("key-form").hidden = false));
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
element("ask").addEventListener("submit", (event) => event.preventDefault());
animate(0);
watch();
