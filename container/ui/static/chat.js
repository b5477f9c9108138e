// The chat box: one conversation, or eight prompts at once.

import { answerGrid, burst, choices, sendBurst } from "./burst.js";

const BURST = 8;

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
    const settings = this.#settings();
    const prompts = burst(BURST, own, settings.max_tokens);
    this.#say("user", own ? `8 times: ${own}` : "8 prompts with the same beginning, each to another speaker");
    const answers = answerGrid(prompts);
    this.elements.messages.append(answers.grid);
    this.#follow(this.elements.messages);
    const show = (...piece) => this.#follow(answers.show(...piece));
    try {
      await sendBurst("", prompts, { hasTemplate: this.hasTemplate, settings, signal, show });
    } finally {
      answers.end();
    }
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
