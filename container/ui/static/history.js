// The recent history of each sequence, built from the engine's snapshots.
//
// A row has the engine's times: arrived, admitted, first (token), end. Interruptions are seen only
// as phases in snapshots, so their times are as coarse as the snapshots.

export const WINDOW_S = 20;
const MAX_ROWS = 2000;
const RATE_WINDOW_S = 2;

export class History {
  // keptS: how long a row stays after its end.
  constructor(keptS = WINDOW_S + 1) {
    this.keptS = keptS;
    this.reset();
  }

  reset() {
    this.rows = new Map();
    this.snapshot = null;
    this.counters = null;
    this.tokens = [];
    this.offset = null;
  }

  // localNow: seconds of the page's own clock.
  update(snapshot, counters, localNow) {
    this.snapshot = snapshot;
    this.counters = counters;
    const offset = localNow - snapshot.now;
    const isFirst = this.offset === null || Math.abs(offset - this.offset) > 2;
    this.offset = isFirst ? offset : Math.min(this.offset + 0.001, offset);
    const alive = new Set();
    for (const sequence of snapshot.sequences) {
      alive.add(sequence.id);
      this.#see(sequence, snapshot.now);
    }
    for (const { id, timing } of snapshot.ended) this.#end(id, timing);
    for (const row of this.rows.values()) {
      if (row.end === null && !alive.has(row.id)) close(row, snapshot.now);
    }
    this.#forget(snapshot.now);
    this.tokens.push([snapshot.now, counters.generated_tokens]);
    while (this.tokens.length > 2 && this.tokens[1][0] < snapshot.now - RATE_WINDOW_S) {
      this.tokens.shift();
    }
  }

  // The engine's time that the page shows: a little in the past, so that bars grow smoothly.
  time(localNow) {
    return this.offset === null ? 0 : localNow - this.offset - 0.15;
  }

  tokensPerSecond() {
    const [first, last] = [this.tokens[0], this.tokens.at(-1)];
    return first && last[0] > first[0] ? (last[1] - first[1]) / (last[0] - first[0]) : 0;
  }

  // Median time to the first token, in seconds, over the rows that are kept; null if none has one.
  firstToken() {
    const waits = [];
    for (const { arrived, first } of this.rows.values()) {
      if (first !== null) waits.push(first - arrived);
    }
    waits.sort((a, b) => a - b);
    return waits.length ? waits[waits.length >> 1] : null;
  }

  #row(id) {
    let row = this.rows.get(id);
    if (!row) {
      row = { id, arrived: null, admitted: null, first: null, end: null, breaks: [], generated: 0 };
      this.rows.set(id, row);
    }
    return row;
  }

  #see(sequence, now) {
    const row = this.#row(sequence.id);
    row.arrived = sequence.arrived;
    row.admitted = sequence.phase === "waiting" ? null : sequence.admitted;
    row.first = sequence.first_token;
    row.end = null;
    row.generated = sequence.num_tokens - sequence.num_prompt_tokens;
    const open = row.breaks.at(-1);
    const phase = interruption(sequence);
    if (open && open.to === null) {
      if (open.phase === phase) return;
      open.to = now;
    }
    if (phase) row.breaks.push({ phase, from: now, to: null });
  }

  #end(id, [arrived, admitted, first, finished]) {
    const row = this.#row(id);
    Object.assign(row, { arrived, admitted, first });
    close(row, finished);
  }

  #forget(now) {
    for (const [id, row] of this.rows) {
      const isOld = row.end !== null && row.end < now - this.keptS;
      if (isOld || this.rows.size > MAX_ROWS) this.rows.delete(id);
    }
  }
}

// Returns the phase of a sequence that ran before and was preempted; null for all others.
function interruption({ phase, first_token }) {
  if (phase === "preempted" || phase === "swapped") return phase;
  return phase === "prefill" && first_token !== null ? "prefill" : null;
}

function close(row, time) {
  row.end = time;
  const open = row.breaks.at(-1);
  if (open && open.to === null) open.to = time;
}
