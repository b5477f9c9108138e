// Vercel's AI SDK, with its provider for servers that are compatible with OpenAI's.
import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError,
  cosineSimilarity,
  embed,
  embedMany,
  generateText,
  isStepCount,
  jsonSchema,
  Output,
  streamText,
  tool,
} from "ai";

import {
  assertStops,
  collect,
  ENCODER_URL,
  GREET_SCHEMA,
  LONG,
  NAMES,
  SERVER_URL,
  Speaker,
} from "./shared.mjs";

const provider = (url) =>
  createOpenAICompatible({
    name: "longshore",
    baseURL: `${url}/v1`,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
const demo = provider(SERVER_URL);
const REQUEST = {
  model: demo("demo"),
  prompt: "Speak.",
  maxOutputTokens: 16,
  temperature: 0,
  maxRetries: 0,
};
const OBJECT = { output: Output.object({ schema: Speaker }), maxOutputTokens: 1000 };
const GREET_TOOL = { description: "Greet someone.", inputSchema: jsonSchema(GREET_SCHEMA) };
const greet = tool({ ...GREET_TOOL, execute: async ({ who }) => `Hello, ${who}.` });

const generate = (fields) => generateText({ ...REQUEST, ...fields });
const stream = (fields) => streamText({ ...REQUEST, onError: () => {}, ...fields });

test("text", async () => {
  const { text, finishReason, usage, warnings } = await generate();
  assert.ok(text.length > 0);
  assert.equal(finishReason, usage.outputTokens === 16 ? "length" : "stop");
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
  assert.deepEqual(warnings ?? [], []);
  assert.equal((await generate()).text, text);
});

test("stream", async () => {
  const whole = await generate();
  const result = stream();
  const parts = await collect(result.textStream);
  assert.ok(parts.length > 2);
  assert.equal(parts.join(""), whole.text);
  assert.equal(await result.finishReason, whole.finishReason);
});

test("stream usage", async () => {
  const whole = await generate();
  const { inputTokens, outputTokens } = await stream().usage;
  assert.equal(inputTokens, whole.usage.inputTokens);
  assert.equal(outputTokens, whole.usage.outputTokens);
  assert.ok(inputTokens > 0 && outputTokens > 0);
});

test("system and turns", async () => {
  const messages = [
    { role: "user", content: "Speak." },
    { role: "assistant", content: "Good morrow." },
    { role: "user", content: [{ type: "text", text: "Sing." }] },
  ];
  const { prompt: _, ...request } = REQUEST;
  const long = await generateText({ ...request, instructions: "Be kind.", messages });
  const short = await generateText({ ...request, messages });
  assert.ok(long.usage.inputTokens > short.usage.inputTokens);
  assert.ok(short.usage.inputTokens > (await generate()).usage.inputTokens);
});

test("stop", async () => {
  const { text } = await generate();
  const stop = text.slice(5, 8);
  const result = await generate({ stopSequences: [stop] });
  assert.equal(result.text, text.slice(0, text.indexOf(stop)));
  assert.equal(result.finishReason, "stop");
  assert.equal((await collect(stream({ stopSequences: [stop] }).textStream)).join(""), result.text);
});

test("tools", async () => {
  const steps = [];
  const { text } = await generate({
    tools: { greet },
    toolChoice: "required",
    maxOutputTokens: 1000,
    stopWhen: isStepCount(2),
    providerOptions: { longshore: { parallel_tool_calls: false } },
    prepareStep: ({ stepNumber }) => (stepNumber === 1 ? { toolChoice: "none" } : {}),
    onStepFinish: (step) => steps.push(step),
  });
  const [called, answered] = steps;
  assert.deepEqual([steps.length, called.finishReason], [2, "tool-calls"]);
  const [{ toolName, input }] = called.toolCalls;
  assert.equal(toolName, "greet");
  assert.ok(NAMES.includes(input.who));
  assert.equal(called.toolResults[0].output, `Hello, ${input.who}.`);
  assert.ok(answered.usage.inputTokens > called.usage.inputTokens);
  assert.equal(text, answered.text);
  assert.ok(text.length > 0);
});

test("tools stream", async () => {
  const request = {
    tools: { greet: tool(GREET_TOOL) },
    toolChoice: { type: "tool", toolName: "greet" },
    maxOutputTokens: 1000,
  };
  const whole = await generate(request);
  const parts = await collect(stream(request).stream);
  const deltas = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta);
  const [call] = parts.filter((part) => part.type === "tool-call");
  assert.deepEqual(JSON.parse(deltas.join("")), call.input);
  assert.deepEqual(call.input, whole.toolCalls[0].input);
  assert.ok(NAMES.includes(call.input.who));
});

test("object", async () => {
  const { output, text } = await generate(OBJECT);
  assert.deepEqual(output, JSON.parse(text));
  assert.deepEqual(Speaker.parse(output), output);
});

test("object stream", async () => {
  const result = stream(OBJECT);
  const partial = await collect(result.partialOutputStream);
  assert.deepEqual(partial.at(-1), await result.output);
  assert.deepEqual(await result.output, (await generate(OBJECT)).output);
});

test("choice", async () => {
  const names = Output.choice({ options: NAMES });
  const { output } = await generate({ output: names, maxOutputTokens: 1000 });
  assert.ok(NAMES.includes(output));
});

test("logprobs", async () => {
  const request = { providerOptions: { longshore: { logprobs: true, top_logprobs: 2 } } };
  const { text, finalStep } = await generate({ ...request, include: { responseBody: true } });
  const tokens = finalStep.response.body.choices[0].logprobs.content;
  assert.equal(tokens.map((token) => token.token).join(""), text);
  assert.ok(tokens.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2));
});

test("completions", async () => {
  const request = { ...REQUEST, model: demo.completionModel("demo"), prompt: "ROMEO:" };
  const whole = await generateText(request);
  const parts = await collect(streamText(request).textStream);
  assert.ok(whole.text.length > 0 && parts.length > 2);
  assert.equal(parts.join(""), whole.text);
});

test("embeddings", async () => {
  const model = provider(ENCODER_URL).embeddingModel("encoder");
  const values = ["the cat sat", "a dog ran"];
  const { embeddings, usage } = await embedMany({ model, values });
  const one = await embed({ model, value: values[1] });
  assert.deepEqual([embeddings.length, usage.tokens], [2, 10]); // 3 words and 2 special tokens each
  assert.ok(cosineSimilarity(one.embedding, embeddings[1]) > 0.9999);
  assert.ok(cosineSimilarity(...embeddings) < 0.999);
});

function assertRefused(error) {
  assert.ok(APICallError.isInstance(error));
  assert.deepEqual([error.statusCode, error.isRetryable], [400, false]);
  assert.equal(error.data.error.type, "invalid_request_error");
  assert.match(error.message, /temperature/);
  return true; // for assert.rejects
}

test("errors", async () => {
  await assert.rejects(generate({ temperature: -1 }), assertRefused);
});

test("stream errors", async () => {
  const errors = [];
  const onError = ({ error }) => errors.push(error);
  const parts = await collect(stream({ temperature: -1, onError }).stream);
  assert.ok(parts.every((part) => part.type !== "text-delta"));
  assert.equal(errors.length, 1);
  assertRefused(errors[0]);
});

test("abort", async () => {
  await assertStops(async () => {
    const controller = new AbortController();
    const parts = stream({
      maxOutputTokens: LONG,
      abortSignal: controller.signal,
      providerOptions: { longshore: { ignore_eos: true } },
    }).stream;
    const kinds = [];
    for await (const part of parts) {
      kinds.push(part.type);
      if (part.type === "text-delta") controller.abort();
    }
    assert.equal(kinds.at(-1), "abort");
  });
});
