// Shared by the cases of all clients: the servers' addresses, a prompt, a schema and a tool.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

import { z } from "zod";

export const SERVER_URL = process.env.LONGSHORE_URL;
export const ENCODER_URL = process.env.LONGSHORE_ENCODER_URL;
export const USER = [{ role: "user", content: "Speak." }];
export const LONG = 4000;
export const NAMES = ["Romeo", "Juliet"];
export const GREET_SCHEMA = {
  type: "object",
  properties: { who: { enum: NAMES } },
  required: ["who"],
  additionalProperties: false,
};
export const Speaker = z.strictObject({
  who: z.enum(NAMES),
  age: z.int().min(10).max(20),
});

export async function collect(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

// Runs `read`, which aborts a stream of LONG tokens, and asserts that the server stops generating.
export async function assertStops(read) {
  const before = await metric("generation_tokens_total");
  await read();
  let now = before;
  while (now === before || (await metric("num_requests_running")) > 0) {
    await sleep(50);
    now = await metric("generation_tokens_total");
  }
  now = await metric("generation_tokens_total");
  assert.ok(now - before < LONG / 2, `generated ${now - before} tokens`);
}

async function metric(name) {
  const text = await (await fetch(`${SERVER_URL}/metrics`)).text();
  return Number(text.match(new RegExp(`^vllm:${name}\\{.*\\} (.*)$`, "m"))[1]);
}
