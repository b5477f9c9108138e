"""Use LMI's text schema with `requests`: one answer whole, one streamed.

`python -m examples.clients.requests_client [--url http://localhost:8080] [--prompt TEXT]`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import requests

PARAMETERS = {"max_new_tokens": 20}
TIMEOUT_S = 60


def ask(url: str, prompt: str) -> str:
    """Return the whole answer. Raises RuntimeError with the server's error message."""
    body = {"inputs": prompt, "parameters": PARAMETERS}
    answer = requests.post(f"{url}/invocations", json=body, timeout=TIMEOUT_S)
    if not answer.ok:
        raise RuntimeError(answer.json()["error"])
    return answer.json()["generated_text"]


def stream(url: str, prompt: str) -> Iterator[str]:
    """Yield pieces of text as they arrive.

    Raises RuntimeError for an error before the stream or within it.
    """
    body = {"inputs": prompt, "parameters": PARAMETERS, "stream": True}
    with requests.post(f"{url}/invocations", json=body, timeout=TIMEOUT_S, stream=True) as answer:
        if not answer.ok:
            raise RuntimeError(answer.json()["error"])
        for line in answer.iter_lines():
            token = json.loads(line)["token"]
            if "error_msg" in token:  # the last line: the status was already sent
                raise RuntimeError(token["error_msg"])
            yield token["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8080")
    parser.add_argument("--prompt", default="ROMEO:")
    arguments = parser.parse_args()
    print(ask(arguments.url, arguments.prompt))
    for text in stream(arguments.url, arguments.prompt):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
