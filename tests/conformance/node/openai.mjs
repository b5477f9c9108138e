// OpenAI's client for Node.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";

import {
  assertStops,
  collect,
  ENCODER_URL,
  GREET_SCHEMA,
  LONG,
  NAMES,
  SERVER_URL,
  Speaker,
  USER,
} from "./shared.mjs";

const client = new OpenAI({ baseURL: `${SERVER_URL}/v1`, apiKey: "none", maxRetries: 0 });
const CHAT = { model: "demo", messages: USER, max_tokens: 16, temperature: 0 };
const RESPONSE = { model: "demo", input: "Speak.", max_output_tokens: 16, temperature: 0 };
const GREET = { type: "function", function: { name: "greet", parameters: GREET_SCHEMA } };
const REQUIRED = { tools: [GREET], tool_choice: "required", parallel_tool_calls: false };

const chat = (fields) => client.chat.completions.create({ ...CHAT, ...fields });
const respond = (fields) => client.responses.create({ ...RESPONSE, ...fields });

test("models", async () => {
  const models = await collect(client.models.list());
  assert.deepEqual(models.map((model) => model.id), ["demo"]);
  assert.deepEqual(await client.models.retrieve("demo"), models[0]);
  await assert.rejects(client.models.retrieve("other"), OpenAI.NotFoundError);
});

test("chat", async () => {
  const answer = await chat();
  const [choice] = answer.choices;
  assert.ok(choice.message.content.length > 0);
  assert.equal(choice.finish_reason, answer.usage.completion_tokens === 16 ? "length" : "stop");
  assert.deepEqual(choice, (await chat()).choices[0]);
});

test("chat stream", async () => {
  const whole = await chat();
  const chunks = await collect(await chat({ stream: true }));
  const text = chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");
  assert.ok(chunks.length > 2);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("chat stream helper", async () => {
  const whole = await chat();
  let text = "";
  const stream = client.chat.completions.stream(CHAT).on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
});

test("chat stream usage", async () => {
  const whole = await chat();
  const stream = await chat({ stream: true, stream_options: { include_usage: true } });
  const chunks = await collect(stream);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.deepEqual(chunks.at(-1).usage, whole.usage);
  assert.ok(chunks.slice(0, -1).every((chunk) => chunk.usage === null));
});

test("chat stop", async () => {
  const text = (await chat()).choices[0].message.content;
  const stop = text.slice(5, 8);
  const [choice] = (await chat({ stop: [stop] })).choices;
  assert.equal(choice.message.content, text.slice(0, text.indexOf(stop)));
  assert.equal(choice.finish_reason, "stop");
});

test("chat logprobs", async () => {
  const [choice] = (await chat({ logprobs: true, top_logprobs: 2 })).choices;
  const tokens = choice.logprobs.content;
  assert.equal(tokens.map((token) => token.token).join(""), choice.message.content);
  for (const { token, logprob, top_logprobs: top } of tokens) {
    assert.equal(top.length, 2);
    assert.deepEqual([top[0].token, top[0].logprob], [token, logprob]); // greedy
    assert.ok(top[1].logprob <= logprob && logprob <= 0);
  }
});

test("chat tools", async () => {
  const answer = await chat({ ...REQUIRED, max_tokens: 1000 });
  const { message, finish_reason: reason } = answer.choices[0];
  const [call] = message.tool_calls;
  assert.equal(reason, "tool_calls");
  assert.equal(call.function.name, "greet");
  assert.ok(NAMES.includes(JSON.parse(call.function.arguments).who));
  const result = { role: "tool", tool_call_id: call.id, content: "Hello." };
  const turns = [...USER, message, result];
  const [again] = (await chat({ messages: turns, tools: [GREET], tool_choice: "none" })).choices;
  const [plain] = (await chat()).choices;
  assert.ok(again.message.content.length > 0);
  assert.notEqual(again.message.content, plain.message.content);
});

test("chat tools stream", async () => {
  const whole = await chat({ ...REQUIRED, max_tokens: 1000 });
  const stream = client.chat.completions.stream({ ...CHAT, ...REQUIRED, max_tokens: 1000 });
  const { message, finish_reason: reason } = (await stream.finalChatCompletion()).choices[0];
  const [call] = whole.choices[0].message.tool_calls;
  assert.equal(message.tool_calls.length, 1);
  assert.equal(message.tool_calls[0].function.name, "greet");
  assert.equal(message.tool_calls[0].function.arguments, call.function.arguments);
  assert.equal(reason, "tool_calls");
});

test("chat run tools", async () => {
  const names = [];
  const greet = (input) => names.push(input.who) && "Hello.";
  const runnable = { ...GREET.function, parse: JSON.parse, function: greet };
  const runner = client.chat.completions.runTools({
    ...CHAT,
    max_tokens: 1000,
    tools: [{ type: "function", function: runnable }],
    tool_choice: { type: "function", function: { name: "greet" } },
  });
  await runner.done();
  assert.equal(names.length, 1);
  assert.ok(NAMES.includes(names[0]));
  assert.deepEqual(runner.messages.map((message) => message.role), ["user", "assistant", "tool"]);
});

test("chat parse", async () => {
  const format = zodResponseFormat(Speaker, "speaker");
  const request = { ...CHAT, max_tokens: 1000, response_format: format };
  const { message } = (await client.chat.completions.parse(request)).choices[0];
  assert.deepEqual(message.parsed, JSON.parse(message.content));
  assert.deepEqual(Speaker.parse(message.parsed), message.parsed);
});

function assertRefused(error) {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.deepEqual(
    [error.status, error.type, error.param],
    [400, "invalid_request_error", "temperature"],
  );
  assert.match(error.message, /temperature/);
  return true; // for assert.rejects
}

test("chat errors", async () => {
  await assert.rejects(chat({ temperature: -1 }), assertRefused);
});

test("chat stream errors", async () => {
  await assert.rejects(chat({ stream: true, max_tokens: 0 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "max_tokens");
    return true;
  });
});

test("chat abort", async () => {
  await assertStops(async () => {
    const stream = await chat({ max_tokens: LONG, ignore_eos: true, stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    assert.ok(stream.controller.signal.aborted);
  });
});

test("completions", async () => {
  const request = { model: "demo", prompt: ["ROMEO:", "JULIET:"], max_tokens: 8, temperature: 0 };
  const { choices, usage } = await client.completions.create(request);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...request, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  }
  assert.deepEqual(choices.map((choice) => choice.text), texts);
  assert.ok(usage.completion_tokens <= 16 && texts[0] !== texts[1]);
});

test("embeddings", async () => {
  const encoder = new OpenAI({ baseURL: `${ENCODER_URL}/v1`, apiKey: "none", maxRetries: 0 });
  const request = { model: "encoder", input: ["the cat sat", "a dog ran"] };
  const packed = await encoder.embeddings.create(request); // the client asks for base64
  const plain = await encoder.embeddings.create({ ...request, encoding_format: "float" });
  const one = await encoder.embeddings.create({ ...request, input: request.input[1] });
  const vectors = packed.data.map((item) => item.embedding);
  assert.deepEqual(vectors, plain.data.map((item) => item.embedding.map(Math.fround)));
  assert.deepEqual(packed.data.map((item) => item.index), [0, 1]);
  one.data[0].embedding.forEach((x, i) => assert.ok(Math.abs(x - vectors[1][i]) < 1e-5));
  for (const vector of vectors) assert.ok(Math.abs(Math.hypot(...vector) - 1) < 1e-5);
  assert.notDeepEqual(vectors[0], vectors[1]);
  assert.equal(packed.usage.prompt_tokens, 10); // 3 words and 2 special tokens each
});

test("response", async () => {
  const response = await respond();
  assert.ok(response.output_text.length > 0);
  assert.equal(response.output_text, (await respond()).output_text);
  assert.equal(response.output_text, (await chat()).choices[0].message.content);
  const { input_tokens: input, output_tokens: output, total_tokens: total } = response.usage;
  assert.ok(input > 0 && output > 0 && total === input + output);
});

test("response stream", async () => {
  const whole = await respond();
  const events = await collect(await respond({ stream: true }));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal(events[0].type, "response.created");
  assert.deepEqual(events.at(-1).response.usage, whole.usage);
});

test("response stream helper", async () => {
  const whole = await respond();
  const stream = client.responses.stream(RESPONSE);
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const final = await stream.finalResponse();
  assert.equal(text, whole.output_text);
  assert.equal(final.output_text, text);
});

test("response tools", async () => {
  const tool = { type: "function", ...GREET.function, strict: true };
  const request = { tools: [tool], tool_choice: "required", parallel_tool_calls: false };
  const { output } = await respond({ ...request, max_output_tokens: 1000 });
  const [call] = output;
  assert.deepEqual([output.length, call.type, call.name], [1, "function_call", "greet"]);
  assert.ok(NAMES.includes(JSON.parse(call.arguments).who));
  const result = { type: "function_call_output", call_id: call.call_id, output: "Hello." };
  const input = [...USER, ...output, result];
  const again = await respond({ input, tools: [tool], tool_choice: "none" });
  assert.ok(again.output_text.length > 0);
  assert.notEqual(again.output_text, (await respond()).output_text);
});

test("response parse", async () => {
  const format = zodTextFormat(Speaker, "speaker");
  const request = { ...RESPONSE, max_output_tokens: 1000, text: { format } };
  const { output_parsed: parsed, output_text: text } = await client.responses.parse(request);
  assert.deepEqual(parsed, JSON.parse(text));
  assert.deepEqual(Speaker.parse(parsed), parsed);
});

test("response errors", async () => {
  await assert.rejects(respond({ temperature: -1 }), assertRefused);
});
