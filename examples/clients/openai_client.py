"""Chat with OpenAI's client: one answer whole, one streamed.

`python -m examples.clients.openai_client [--url http://localhost:8080] [--prompt TEXT]`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

MODEL = "any"
"""A container serves one model and ignores this name."""
MAX_TOKENS = 20


def ask(client: OpenAI, prompt: str) -> str:
    """Return the whole answer. Raises openai.APIError."""
    answer = client.chat.completions.create(
        model=MODEL, messages=[_user(prompt)], max_tokens=MAX_TOKENS, temperature=0
    )
    return answer.choices[0].message.content or ""


def stream(client: OpenAI, prompt: str) -> Iterator[str]:
    """Yield pieces of text as they arrive."""
    chunks = client.chat.completions.create(
        model=MODEL, messages=[_user(prompt)], max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    for chunk in chunks:
        yield chunk.choices[0].delta.content or ""


def _user(content: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": content}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8080")
    parser.add_argument("--prompt", default="Speak, Romeo.")
    arguments = parser.parse_args()
    with OpenAI(base_url=f"{arguments.url}/v1", api_key="none") as client:
        print(ask(client, arguments.prompt))
        for text in stream(client, arguments.prompt):
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
