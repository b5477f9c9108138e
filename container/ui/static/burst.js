// Several prompts at once, with answers of four lengths.

import { events, request } from "./api.js";

const OPENING =
  "It is night in Verona. The torches are lit, the square is full of people, and everybody is " +
  "waiting for you to speak. Speak to them now as ";
const SPEAKERS = [
  "a young lover", "an old king", "a fool", "a soldier", "a nurse", "a ghost", "a queen", "the moon",
]; // prettier-ignore
const LENGTHS = [1, 0.25, 0.75, 0.5];
// A browser opens at most six connections to a server, and one of them streams the events. So all
// prompts whose answers have the same length go into one request.

// Returns `count` prompts, each with its answer's length. The prompts begin alike or, if `own` is
// given, are equal to it.
export function burst(count, own, maxTokens) {
  return Array.from({ length: count }, (_, index) => ({
    prompt: own || `${OPENING}${SPEAKERS[index % SPEAKERS.length]}.`,
    length: Math.max(1, Math.round(maxTokens * LENGTHS[index % LENGTHS.length])),
  }));
}

// Sends a burst and returns when all answers have ended. base: the path of the model's API, such as
// "models/paged/". Calls show(index, text, isEnd) for each piece of an answer.
export async function sendBurst(base, prompts, { hasTemplate, settings, signal, show }) {
  const inputs = await Promise.all(
    prompts.map(({ prompt }) => (hasTemplate ? tokens(base, prompt, signal) : prompt)),
  );
  const stream = async (first) => {
    const mine = inputs.filter((_, index) => index % LENGTHS.length === first);
    const body = { ...settings, prompt: mine, max_tokens: prompts[first].length, ignore_eos: true };
    for await (const choice of choices(`${base}v1/completions`, body, signal)) {
      show(first + choice.index * LENGTHS.length, choice.text, Boolean(choice.finish_reason));
    }
  };
  const numStreams = Math.min(LENGTHS.length, prompts.length);
  await Promise.all(Array.from({ length: numStreams }, (_, first) => stream(first)));
}

// The token ids of a conversation, which the completions API takes as a prompt.
async function tokens(base, prompt, signal) {
  const body = { messages: [{ role: "user", content: prompt }] };
  const response = await request(`${base}tokenize`, { body, signal });
  return (await response.json()).tokens;
}

export async function* choices(path, body, signal) {
  for await (const { data } of events(path, { body, signal })) {
    if (data.error) throw new Error(data.error.message ?? data.error);
    yield* data.choices ?? [];
  }
}

// Returns a grid with a card for each answer. `show` adds text to a card and returns the text's
// element.
export function answerGrid(prompts) {
  const grid = document.createElement("div");
  grid.className = "burst";
  const cards = prompts.map(({ length }, index) => {
    const card = document.createElement("article");
    card.className = "answer streaming";
    const title = document.createElement("h3");
    title.textContent = `Answer ${index + 1}`;
    const note = document.createElement("span");
    note.textContent = `${length} tokens`;
    title.append(note);
    card.append(title, document.createElement("p"));
    return card;
  });
  grid.append(...cards);
  const show = (index, text, isEnd) => {
    cards[index].lastChild.append(text);
    if (isEnd) cards[index].classList.remove("streaming");
    return cards[index].lastChild;
  };
  const end = () => cards.forEach((card) => card.classList.remove("streaming"));
  return { grid, show, end };
}
