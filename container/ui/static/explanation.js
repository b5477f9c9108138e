// What each strategy does, in a sentence or two. The comparison page shows the strategies in this
// order.

const RESERVED = {
  max: "the longest answer that the model allows",
  pow2: "its prompt and its longest answer, rounded up to a power of two",
  oracle: "its prompt and its longest answer",
};

const SENTENCES = {
  none: () =>
    "One request runs at a time. The next one starts when the one before it has ended, so all others wait.",
  dynamic: ({ max_sequences: most, max_batch_delay_ms: delay }) =>
    `A batch starts when ${most} requests wait, or with fewer after ${delay} milliseconds. ` +
    "It runs until its longest answer ends; only then does the next batch start.",
  continuous: ({ kv_reservation: reservation }) =>
    "Requests join and leave the batch between any two steps. Each one reserves memory for " +
    `${RESERVED[reservation]} when it joins.`,
  paged: ({ block_size: size }) =>
    "Requests join and leave the batch between any two steps. Each one takes memory in blocks of " +
    `${size} tokens as it grows, and prompts that begin alike share blocks.`,
};

export const STRATEGIES = Object.keys(SENTENCES);

export function explain(settings) {
  return SENTENCES[settings.batching](settings);
}
