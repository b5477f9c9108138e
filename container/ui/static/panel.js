// One strategy of the page that compares them: its figures, its batch and its KV memory.

import { events } from "./api.js";
import { batchLegend, drawBatch } from "./batch.js";
import { blocksLegend, drawBlocks } from "./blocks.js";
import { answerGrid, sendBurst } from "./burst.js";
import { explain } from "./explanation.js";
import { History } from "./history.js";
import { setNumber, setRounded, setSeconds } from "./numbers.js";

const localNow = () => performance.now() / 1000;

export class Panel {
  // root: a copy of the template. changed: called after each snapshot.
  constructor(strategy, root, changed) {
    this.base = `models/${strategy}/`;
    this.root = root;
    this.changed = changed;
    this.history = new History(Infinity);
    this.settings = null;
    this.isRunning = false;
    this.waiters = [];
    this.clear();
    this.#part("name").textContent = strategy;
  }

  #part(name) {
    return this.root.querySelector(`.${name}`);
  }

  say(text) {
    this.#part("state").textContent = text;
  }

  clear() {
    this.history.reset();
    this.tokensBefore = 0;
    this.fullest = null; // the snapshot in which sequences hold most blocks
    for (const name of ["rate", "first-token", "duration", "kv-use"]) setNumber(this.#part(name), "–");
    this.#part("answers").replaceChildren();
    this.say("");
  }

  // Asks the engine for its settings and the state of its memory.
  async load() {
    await this.#watched(() => this.#until(() => this.history.snapshot));
  }

  // Sends the prompts and returns when all answers have ended.
  async run(prompts, settings, signal) {
    this.clear();
    const { grid, show, end } = answerGrid(prompts);
    this.#part("answers").replaceChildren(grid);
    const work = async (inner) => {
      await this.#until(() => this.history.snapshot);
      if (this.history.snapshot.sequences.length) this.say("waits for other requests to end");
      await this.#until(() => !this.history.snapshot.sequences.length);
      this.say("running");
      this.history.rows.clear(); // drops the rows of a run that was stopped
      this.tokensBefore = this.history.counters.generated_tokens;
      this.isRunning = true;
      const hasTemplate = this.settings.chat;
      await sendBurst(this.base, prompts, { hasTemplate, settings, signal: inner, show });
      await this.#until(() => this.#ended().length >= prompts.length);
    };
    try {
      await this.#watched(work, signal);
      this.say("done");
    } finally {
      this.isRunning = false;
      end();
    }
  }

  // Seconds from the first request until now or, after the run, until the last answer ended.
  duration() {
    const [from, to] = this.#range();
    return Math.max(0, to - from);
  }

  // seconds: the time that the chart shows, which is the same for all strategies. step: the time
  // between two ticks.
  draw(seconds, step) {
    if (!this.settings) return;
    const [from, now] = this.#range();
    const ticks = [];
    for (let time = 0; time <= seconds + step / 2; time += step) {
      ticks.push([from + time, `${+time.toFixed(1)} s`]);
    }
    const period = { from, seconds, now, ticks, during: "" };
    drawBatch(this.#part("batch"), this.history, this.settings, period);
  }

  drawAll(seconds, step) {
    if (!this.settings) return;
    batchLegend(this.#part("batch-legend"), this.settings);
    blocksLegend(this.#part("blocks-legend"), this.settings);
    this.#drawBlocks();
    this.draw(seconds, step);
  }

  // Runs the work while the engine's snapshots arrive; the work ends if they end.
  async #watched(work, signal) {
    const controller = new AbortController();
    const inner = signal ? AbortSignal.any([signal, controller.signal]) : controller.signal;
    try {
      await Promise.race([this.#watch(inner), work(inner)]);
    } finally {
      controller.abort();
      this.waiters = [];
    }
  }

  async #watch(signal) {
    for await (const { event, data } of events(`${this.base}ui/events`, { signal })) {
      if (event === "down") throw new Error(data.reason);
      if (event === "engine") this.#onEngine(data);
      if (event === "snapshot") this.#onSnapshot(data);
    }
    throw new Error("the server has closed the stream of events");
  }

  #onEngine(settings) {
    this.settings = settings;
    this.#part("explanation").textContent = explain(settings);
  }

  #onSnapshot({ snapshot, counters }) {
    this.history.update(snapshot, counters, localNow());
    if (this.isRunning) this.#showFigures(snapshot, counters);
    this.#drawBlocks();
    this.waiters.splice(0).forEach((resolve) => resolve());
    this.changed();
  }

  #showFigures(snapshot, counters) {
    const duration = this.duration();
    const numTokens = counters.generated_tokens - this.tokensBefore;
    const rate = duration > 0 ? numTokens / duration : 0;
    setRounded(this.#part("rate"), rate);
    setSeconds(this.#part("first-token"), this.history.firstToken());
    setSeconds(this.#part("duration"), duration);
    if (snapshot.num_held_blocks > (this.fullest?.num_held_blocks ?? 0)) this.fullest = snapshot;
    const use = (100 * (this.fullest?.num_held_blocks ?? 0)) / snapshot.num_blocks;
    setRounded(this.#part("kv-use"), use, "%");
  }

  // The memory now or, after the run, when it was fullest.
  #drawBlocks() {
    const isOver = !this.isRunning && this.fullest !== null;
    const snapshot = isOver ? this.fullest : this.history.snapshot;
    if (!snapshot) return;
    const range = drawBlocks(this.#part("blocks"), snapshot, this.settings);
    this.#part("blocks-range").textContent = `KV memory${isOver ? " at its fullest" : ""}: ${range}`;
  }

  #ended() {
    return [...this.history.rows.values()].filter((row) => row.end !== null);
  }

  // Two times of the engine: when the first request arrived, and the end of what the charts show.
  #range() {
    const rows = [...this.history.rows.values()];
    if (!rows.length) return [0, 0];
    const isOver = rows.every((row) => row.end !== null);
    const last = Math.max(...rows.map((row) => row.end ?? 0));
    const now = isOver ? last : this.isRunning ? this.history.time(localNow()) : this.history.snapshot.now;
    return [Math.min(...rows.map((row) => row.arrived)), now];
  }

  async #until(isTrue) {
    while (!isTrue()) await new Promise((resolve) => this.waiters.push(resolve));
  }
}
