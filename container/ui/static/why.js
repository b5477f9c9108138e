// Why a request waited, and its receipt.

const RECEIPT = {
  compute_ns: ["computing", duration],
  kv_block_ns: ["KV blocks × time", blockTime],
  kv_shared_block_ns: ["of them shared", blockTime],
  num_preemptions: ["preemptions", String],
  num_cached_tokens: ["cached tokens", String],
};

// found: the server's answer. page: begin of the recording; functions that select another request,
// go to a moment, and fork without the requests of a cause.
export function showWhy(list, found, page) {
  const { causes, receipt } = found;
  list.replaceChildren(
    summary(found, page.begin),
    heading(causes.length ? "It waited" : "It did not wait"),
    ...causes.map((cause) => causeItem(cause, page)),
    heading("Receipt"),
    receiptTable(receipt),
  );
}

function summary({ row, max_tokens: most, num_samples: samples }, begin) {
  const end = row.end === null ? "" : ` and ended after ${seconds(row.end - row.arrived)} (${row.ended_by})`;
  const first = row.first === null ? "no token came" : `the first token came after ${seconds(row.first - row.arrived)}`;
  return element(
    "p",
    "",
    `${row.num_prompt_tokens} tokens of prompt, ${row.generated} of at most ${most} of the answer` +
      `${samples > 1 ? `, ${samples} samples` : ""}. It arrived at ${seconds(row.arrived - begin)}; ${first}${end}.`,
  );
}

function causeItem(cause, { begin, select, goTo, without }) {
  const item = element("div", "cause", "");
  const text = element("p", "", cause.text);
  const link = chip(`at ${(cause.since - begin).toFixed(2)} s`, () => goTo(cause.since));
  link.title = "Go to this moment";
  text.append(" ", link);
  item.append(text);
  if (cause.blockers.length) {
    const claim = cause.is_smallest && cause.blockers.length > 1
      ? "Without all of these it would have started then; without fewer it would not:"
      : "It would have started then without";
    item.append(element("p", "hint", claim), chips(cause, select, without));
  } else if (cause.option) {
    item.append(element("p", "hint", `With option.${cause.option}=0 it would have started then.`));
  }
  return item;
}

function chips(cause, select, without) {
  const box = element("div", "chips", "");
  for (const { id, num_blocks: held, is_running: runs } of cause.blockers) {
    box.append(chip(`#${id} ${runs ? `ran, ${held} blocks` : "was in front"}`, () => select(id)));
  }
  box.append(chip("Fork without", () => without(cause)));
  return box;
}

function chip(text, onClick) {
  const button = element("button", "chip", text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

function receiptTable(receipt) {
  const table = document.createElement("dl");
  table.className = "receipt";
  const add = (name, text) => {
    const pair = document.createElement("div");
    pair.append(element("dt", "", name), element("dd", "", text));
    table.append(pair);
  };
  for (const [name, [text, format]] of Object.entries(RECEIPT)) add(text, format(receipt[name]));
  for (const [reason, ns] of Object.entries(receipt.queued_ns)) add(`queued: ${reason}`, duration(ns));
  return table;
}

function heading(text) {
  return element("h3", "", text);
}

function element(name, kind, text) {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  return made;
}

function seconds(value) {
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

function duration(ns) {
  return seconds(ns / 1e9);
}

function blockTime(ns) {
  return `${(ns / 1e9).toFixed(1)} s`;
}
