// Requests to the server. The page makes all requests here, so only this file uses the API key.

const KEY = "longshore-api-key";
const listeners = new Set();

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function onUnauthorized(listener) {
  listeners.add(listener);
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

// Sends POST if there is a body, else GET. Throws RequestError for any status but 2xx.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    cache: "no-store",
    signal,
  });
  if (response.ok) return response;
  if (response.status === 401) listeners.forEach((listener) => listener());
  throw new RequestError(response.status, await reason(response));
}

async function reason(response) {
  try {
    const { error } = await response.json();
    return error.message ?? error;
  } catch {
    return `status ${response.status}`;
  }
}

// Yields { event, data } for each server-sent event, with its data parsed as JSON.
export async function* events(path, options) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let event = "message";
  let data = null;
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    if (line.startsWith("data: ")) data = line.slice(6);
  }
  return data === null || data === "[DONE]" ? null : { event, data: JSON.parse(data) };
}
