// The page that compares strategies. It sends the same requests to one strategy after the other.
//
// One strategy runs at a time, so that it has the whole machine, and because a browser opens only six
// connections.

import { onUnauthorized, request, setKey } from "./api.js";
import { burst } from "./burst.js";
import { STRATEGIES } from "./explanation.js";
import { longestAnswer } from "./numbers.js";
import { Panel } from "./panel.js";

const RETRY_MS = 1000;
const FRAME_MS = 45;
const MOST_TICKS = 8;
const SEED = 1;
const element = (id) => document.getElementById(id);
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
let panels = [];
let running = null;
let shown = "";

function setStatus(text, kind = "") {
  element("status").textContent = text;
  element("status").className = kind;
}

// The time that all charts show, and the time between two ticks, in seconds.
function scale() {
  const longest = Math.max(1, ...panels.map((panel) => panel.duration()));
  let step = 0.5;
  for (let times = [2, 2, 2.5], index = 0; longest / step > MOST_TICKS; index += 1) {
    step *= times[index % times.length];
  }
  return [Math.ceil(longest / step) * step, step];
}

// Draws the charts that have changed: the running one, or all of them if the scale has changed.
function draw() {
  const [seconds, step] = scale();
  const isSame = shown === `${seconds} ${step}`;
  shown = `${seconds} ${step}`;
  for (const panel of panels) {
    if (!isSame || panel.isRunning) panel.draw(seconds, step);
  }
}

function drawAll() {
  for (const panel of panels) panel.drawAll(...scale());
}

// On a CPU the browser shares the cores with the engine, so it draws no more than it has to.
function animate(time, lastDrawn = -Infinity) {
  const isDue = running && time - lastDrawn > FRAME_MS;
  if (isDue && !isCalm.matches) draw();
  requestAnimationFrame((next) => animate(next, isDue ? time : lastDrawn));
}

async function run() {
  running = new AbortController();
  const { signal } = running;
  element("send").disabled = true;
  element("stop").disabled = false;
  const maxTokens = Number(element("max-tokens").value);
  const prompts = burst(Number(element("count").value), element("text").value.trim(), maxTokens);
  const settings = { temperature: Number(element("temperature").value), seed: SEED, stream: true };
  for (const panel of panels) {
    panel.clear();
    panel.say("waits for its turn");
  }
  drawAll();
  for (const panel of panels) {
    if (signal.aborted) panel.say("stopped");
    else await runOne(panel, prompts, settings, signal);
  }
  running = null;
  element("send").disabled = false;
  element("stop").disabled = true;
}

async function runOne(panel, prompts, settings, signal) {
  try {
    await panel.run(prompts, settings, signal);
  } catch (error) {
    panel.say(signal.aborted ? "stopped" : error.message);
  }
  drawAll();
}

// Returns the strategies that the server has, once it has loaded all of them.
async function strategies() {
  for (;;) {
    try {
      await request("ping");
      const { models } = await (await request("models")).json();
      const names = models.map(({ modelName }) => modelName);
      return STRATEGIES.filter((strategy) => names.includes(strategy));
    } catch (error) {
      setStatus(error.message, "down");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function open() {
  for (const strategy of await strategies()) {
    const root = element("panel").content.firstElementChild.cloneNode(true);
    element("panels").append(root);
    panels.push(new Panel(strategy, root, () => isCalm.matches && draw()));
  }
  for (const panel of panels) await panel.load().catch((error) => panel.say(error.message));
  const model = panels.find(({ settings }) => settings)?.settings.model ?? "";
  element("model").textContent = model.split("/").at(-1);
  const lengths = panels.flatMap(({ settings }) => settings?.max_model_len ?? []);
  const slider = element("max-tokens");
  slider.max = longestAnswer(Math.min(...lengths));
  slider.dispatchEvent(new Event("input"));
  drawAll();
  element("send").disabled = false;
  setStatus("live", "live");
}

for (const [id, unit] of [["count", ""], ["max-tokens", " tokens"], ["temperature", ""]]) {
  const show = () => {
    element(`${id}-value`).textContent = element(id).value + unit;
    const count = element("count").value;
    element("send").textContent = count === "1" ? "Send 1 request" : `Send ${count} requests`;
  };
  element(id).addEventListener("input", show);
  show();
}
element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) run();
});
element("stop").addEventListener("click", () => running?.abort());
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(element("key").value);
  location.reload();
});
onUnauthorized(() => (element("key-form").hidden = false));
addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
animate(0);
open();
