// Run by test_page_script.py: what the live page remembers of the engine's snapshots.

import assert from "node:assert/strict";
import { test } from "node:test";

import { History, WINDOW_S } from "../../../container/ui/static/history.js";

function sequence(id, phase, more = {}) {
  return {
    id, request: id, phase, num_prompt_tokens: 4, num_tokens: 6, num_computed_tokens: 5,
    max_length: 20, arrived: 1, admitted: 2, first_token: 3, blocks: [], ...more,
  }; // prettier-ignore
}

function see(history, now, sequences, { ended = [], tokens = 0 } = {}) {
  history.update({ now, sequences, ended }, { generated_tokens: tokens }, now + 50);
}

test("a row has the engine's times", () => {
  const history = new History();
  see(history, 5, [sequence(7, "decode")]);
  const { arrived, admitted, first, end, breaks, generated } = history.rows.get(7);
  assert.deepEqual({ arrived, admitted, first, end, generated }, { arrived: 1, admitted: 2, first: 3, end: null, generated: 2 });
  assert.deepEqual(breaks, []);
});

test("a waiting request has not been admitted", () => {
  const history = new History();
  see(history, 5, [sequence(7, "waiting", { first_token: null })]);
  assert.equal(history.rows.get(7).admitted, null);
});

test("a preemption and the prefill after it are breaks, timed by the snapshots", () => {
  const history = new History();
  const phases = ["decode", "preempted", "preempted", "prefill", "decode", "swapped"];
  phases.forEach((phase, index) => see(history, 5 + index, [sequence(7, phase)]));
  see(history, 12, [], { ended: [{ id: 7, timing: [1, 2, 3, 11.5] }] });
  assert.deepEqual(history.rows.get(7).breaks, [
    { phase: "preempted", from: 6, to: 8 },
    { phase: "prefill", from: 8, to: 9 },
    { phase: "swapped", from: 10, to: 11.5 },
  ]);
  assert.equal(history.rows.get(7).end, 11.5);
});

test("an answer between two snapshots has a row, and an aborted request ends when it is gone", () => {
  const history = new History();
  see(history, 5, [sequence(7, "decode")]);
  see(history, 6, [], { ended: [{ id: 8, timing: [5.1, 5.2, 5.3, 5.4] }] });
  assert.equal(history.rows.get(7).end, 6);
  assert.equal(history.rows.get(8).end, 5.4);
});

test("hours of requests leave only the rows of the window", () => {
  const history = new History();
  for (let id = 0; id < 5000; id += 1) {
    see(history, id, [sequence(id, "decode")], { tokens: 30 * id });
  }
  assert.ok(history.rows.size <= WINDOW_S + 3);
  assert.ok(history.tokens.length < 5);
  assert.equal(history.tokensPerSecond(), 30);
});

test("a page that shows whole runs keeps all rows", () => {
  const history = new History(Infinity);
  for (let id = 0; id < 100; id += 1) see(history, id, [sequence(id, "decode")]);
  assert.equal(history.rows.size, 100);
});

test("the time to the first token is the median of the window", () => {
  const history = new History();
  assert.equal(history.firstToken(), null);
  see(history, 5, [2, 3, 9].map((first_token, id) => sequence(id, "decode", { first_token })));
  assert.equal(history.firstToken(), 2);
});

test("a new engine, whose clock and ids begin again, starts with no rows", () => {
  const history = new History();
  see(history, 5000, [sequence(7, "decode")]);
  history.reset();
  see(history, 3, []);
  assert.equal(history.rows.size, 0);
  assert.ok(history.time(53) > 2.5 && history.time(53) <= 3);
});
