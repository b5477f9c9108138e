// The chat box: one conversation, or eight prompts at once.

import { events, request } from "./api.js";

const OPENING =
  "It is night in Verona. The torches are lit, the square is full of people, and everybody is " +
  "waiting for you to speak. Speak to them now as ";
const SPEAKERS = [
  "a young lover", "an old king", "a fool", "a soldier", "a nurse", "a ghost", "a queen", "the moon",
]; // prettier-ignore
const LENGTHS = [1, 0.25, 0.75, 0.5];
// A browser opens at most six connections to a server, and one of them streams the events. So the
// eight prompts are four requests of two prompts each.

export class Chat {
  constructor(elements, hasTemplate) {
    this.elements = elements;
    this.hasTemplate = hasTemplate;
    this.conversation = [];
    this.running = new Set();
    this.growing = new Set();
    elements.ask.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run(elements.send, (signal) => this.#send(signal));
    });
    elements.burst.addEventListener("click", () =>
      this.#run(elements.burst, (signal) => this.#sendEight(signal)),
    );
    elements.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!elements.send.disabled) elements.ask.requestSubmit();
    });
    elements.stop.addEventListener("click", () => this.#stop());
    elements.clear.addEventListener("click", () => {
      this.#stop();
      this.conversation = [];
      elements.messages.replaceChildren();
    });
  }

  async #run(button, work) {
    const controller = new AbortController();
    this.running.add(controller);
    button.disabled = true;
    this.elements.stop.disabled = false;
    try {
      await work(controller.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.#say("error", error.message);
    } finally {
      this.running.delete(controller);
      button.disabled = false;
      this.elements.stop.disabled = this.running.size === 0;
    }
  }

  #stop() {
    this.running.forEach((controller) => controller.abort());
  }

  #settings() {
    const { maxTokens, temperature } = this.elements;
    return { max_tokens: Number(maxTokens.value), temperature: Number(temperature.value), stream: true };
  }

  async #send(signal) {
    const text = this.elements.text.value;
    if (!text.trim()) return;
    this.elements.text.value = "";
    this.#say("user", text);
    const conversation = this.conversation;
    conversation.push({ role: "user", content: text });
    const bubble = this.#say("streaming", "");
    let answer = "";
    let reasoning = ""; // shown until the answer begins
    try {
      for await (const piece of this.#answer(conversation, text, signal)) {
        answer += piece.content;
        reasoning += piece.reasoning;
        this.#write(bubble, answer || reasoning);
      }
    } finally {
      bubble.classList.remove("streaming");
      if (answer) conversation.push({ role: "assistant", content: answer });
      else {
        conversation.pop();
        bubble.remove();
      }
    }
  }

  async *#answer(conversation, text, signal) {
    const [path, body] = this.hasTemplate
      ? ["v1/chat/completions", { messages: conversation }]
      : ["v1/completions", { prompt: text }];
    for await (const choice of choices(path, { ...body, ...this.#settings() }, signal)) {
      const delta = choice.delta ?? {};
      yield { content: delta.content ?? choice.text ?? "", reasoning: delta.reasoning ?? "" };
    }
  }

  async #sendEight(signal) {
    const own = this.elements.text.value.trim();
    const prompts = SPEAKERS.map((speaker) => own || `${OPENING}${speaker}.`);
    this.#say("user", own ? `8 times: ${own}` : "8 prompts with the same beginning, each to another speaker");
    const settings = this.#settings();
    const inputs = await Promise.all(prompts.map((prompt) => this.#input(prompt, signal)));
    const lengths = LENGTHS.map((share) => Math.max(1, Math.round(settings.max_tokens * share)));
    const cards = this.#cards(inputs.map((_, index) => lengths[index % LENGTHS.length]));
    const stream = async (max_tokens, group) => {
      const mine = [inputs[group], inputs[group + LENGTHS.length]];
      const body = { ...settings, prompt: mine, max_tokens, ignore_eos: true };
      for await (const { index, text, finish_reason } of choices("v1/completions", body, signal)) {
        const card = cards[group + index * LENGTHS.length];
        card.lastChild.append(text);
        this.#follow(card.lastChild);
        if (finish_reason) card.classList.remove("streaming");
      }
    };
    try {
      await Promise.all(lengths.map(stream));
    } finally {
      cards.forEach((card) => card.classList.remove("streaming"));
    }
  }

  // A prompt as the completions API takes it: token ids of a conversation, or plain text.
  async #input(prompt, signal) {
    if (!this.hasTemplate) return prompt;
    const body = { messages: [{ role: "user", content: prompt }] };
    const response = await request("tokenize", { body, signal });
    return (await response.json()).tokens;
  }

  #say(kind, text) {
    const bubble = document.createElement("div");
    bubble.className = `message ${kind}`;
    this.elements.messages.append(bubble);
    this.#write(bubble, text);
    return bubble;
  }

  #write(bubble, text) {
    bubble.textContent = text;
    this.#follow(this.elements.messages);
  }

  #cards(lengths) {
    const grid = document.createElement("div");
    grid.className = "burst";
    const cards = lengths.map((length, index) => {
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
    this.elements.messages.append(grid);
    this.#follow(this.elements.messages);
    return cards;
  }

  // Scrolls to the end, once a frame.
  #follow(box) {
    if (this.growing.size === 0) {
      requestAnimationFrame(() => {
        for (const grown of this.growing) grown.scrollTop = grown.scrollHeight;
        this.growing.clear();
      });
    }
    this.growing.add(box);
  }
}

async function* choices(path, body, signal) {
  for await (const { data } of events(path, { body, signal })) {
    if (data.error) throw new Error(data.error.message ?? data.error);
    yield* data.choices ?? [];
  }
}
