// Anthropic's client for Node.
import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";

import {
  assertStops,
  collect,
  GREET_SCHEMA,
  LONG,
  NAMES,
  SERVER_URL,
  Speaker,
  USER,
} from "./shared.mjs";

const client = new Anthropic({ baseURL: SERVER_URL, apiKey: "none", maxRetries: 0 });
const REQUEST = { model: "demo", max_tokens: 16, messages: USER, temperature: 0 };
const GREET = { name: "greet", description: "Greet someone.", input_schema: GREET_SCHEMA };
const REQUIRED = { tools: [GREET], tool_choice: { type: "any", disable_parallel_tool_use: true } };

const create = (fields) => client.messages.create({ ...REQUEST, ...fields });

test("models", async () => {
  assert.deepEqual((await collect(client.models.list())).map((model) => model.id), ["demo"]);
  assert.equal((await client.models.retrieve("demo")).id, "demo");
});

test("message", async () => {
  const message = await create({ system: "Be kind." });
  const [block] = message.content;
  assert.equal(block.type, "text");
  assert.ok(block.text.length > 0);
  assert.equal(message.stop_reason, message.usage.output_tokens === 16 ? "max_tokens" : "end_turn");
  assert.deepEqual((await create({ system: "Be kind." })).content, message.content);
  assert.ok(message.usage.input_tokens > (await create()).usage.input_tokens);
});

test("stream", async () => {
  const whole = await create();
  const events = await collect(await create({ stream: true }));
  const deltas = events.filter((event) => event.type === "content_block_delta");
  assert.equal(deltas.map((event) => event.delta.text).join(""), whole.content[0].text);
  assert.deepEqual([events[0].type, events.at(-1).type], ["message_start", "message_stop"]);
  assert.ok(deltas.length > 2);
});

test("stream usage", async () => {
  const whole = await create();
  const events = await collect(await create({ stream: true }));
  const delta = events.find((event) => event.type === "message_delta");
  assert.equal(events[0].message.usage.input_tokens, whole.usage.input_tokens);
  assert.equal(delta.usage.output_tokens, whole.usage.output_tokens);
  assert.equal(delta.delta.stop_reason, whole.stop_reason);
});

test("stream helper", async () => {
  const whole = await create();
  let text = "";
  const stream = client.messages.stream(REQUEST).on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, whole.content[0].text);
  assert.equal(final.content[0].text, text);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test("stop sequence", async () => {
  const [{ text }] = (await create()).content;
  const stop = text.slice(5, 8);
  const message = await create({ stop_sequences: [stop] });
  assert.deepEqual([message.stop_reason, message.stop_sequence], ["stop_sequence", stop]);
  assert.equal(message.content[0].text, text.slice(0, text.indexOf(stop)));
});

test("tools", async () => {
  const { content, stop_reason: reason } = await create({ ...REQUIRED, max_tokens: 1000 });
  const [call] = content;
  assert.deepEqual([reason, content.length], ["tool_use", 1]);
  assert.deepEqual([call.type, call.name], ["tool_use", "greet"]);
  assert.ok(NAMES.includes(call.input.who));
  const result = { type: "tool_result", tool_use_id: call.id, content: "Hello." };
  const turns = [...USER, { role: "assistant", content }, { role: "user", content: [result] }];
  const again = await create({ messages: turns, tools: [GREET], tool_choice: { type: "none" } });
  assert.ok(again.content[0].text.length > 0);
  assert.notEqual(again.content[0].text, (await create()).content[0].text);
});

test("tools stream", async () => {
  const whole = await create({ ...REQUIRED, max_tokens: 1000 });
  const stream = client.messages.stream({ ...REQUEST, ...REQUIRED, max_tokens: 1000 });
  let json = "";
  stream.on("inputJson", (part) => (json += part));
  const { content, stop_reason: reason } = await stream.finalMessage();
  assert.deepEqual(JSON.parse(json), content[0].input);
  assert.deepEqual(content[0].input, whole.content[0].input);
  assert.equal(reason, "tool_use");
});

test("parse", async () => {
  const Name = Speaker.pick({ who: true }); // the client drops the bounds of numbers
  const format = zodOutputFormat(Name);
  const request = { ...REQUEST, max_tokens: 1000, output_config: { format } };
  const { parsed_output: parsed, content } = await client.messages.parse(request);
  assert.deepEqual(parsed, JSON.parse(content[0].text));
  assert.deepEqual(Name.parse(parsed), parsed);
});

test("count tokens", async () => {
  const counted = await client.messages.countTokens({ model: "demo", messages: USER });
  assert.equal(counted.input_tokens, (await create()).usage.input_tokens);
});

test("errors", async () => {
  for (const stream of [false, true]) {
    await assert.rejects(create({ temperature: -1, stream }), (error) => {
      assert.ok(error instanceof Anthropic.BadRequestError);
      assert.deepEqual([error.status, error.type], [400, "invalid_request_error"]);
      assert.match(error.message, /temperature/);
      return true;
    });
  }
});

test("abort", async () => {
  await assertStops(async () => {
    const stream = await create({ max_tokens: LONG, ignore_eos: true, stream: true });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    assert.ok(stream.controller.signal.aborted);
  });
});
