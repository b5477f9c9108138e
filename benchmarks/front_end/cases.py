"""What is measured: an API, streams or whole answers, over so many connections, at a pace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec

PROMPT = "Write a long story about a quick brown fox and a lazy dog."
APIS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "text": ("/invocations", {"inputs": PROMPT}),
    "completions": ("/v1/completions", {"prompt": PROMPT}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
}
"""The path and the body of a request, without its parameters."""
FASTEST_STEP_S = 0.01
"""No single answer is faster than 100 tokens a second, unless the pace is `flood`."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    api: str
    is_stream: bool
    connections: int
    rate: int
    """Tokens that the engine generates in a second, of all requests together."""
    is_flood: bool
    """Whether the rate is more than the front end can send."""
    tokens: int
    """Tokens of each answer."""
    requests: int
    """Requests of one token, which tell what a request costs."""

    @property
    def step_s(self) -> float:
        """Seconds between the engine's steps, each of which is a token of every request."""
        step_s = self.connections / self.rate
        return step_s if self.is_flood else max(FASTEST_STEP_S, step_s)

    @property
    def name(self) -> str:
        kind = "streams" if self.is_stream else "whole answers"
        return f"{self.api}, {kind}, {self.connections}{', flood' if self.is_flood else ''}"

    def request(self, tokens: int) -> bytes:
        """Return the bytes of an HTTP request for an answer of so many tokens."""
        path, body = APIS[self.api]
        parameters: dict[str, object] = {"seed": max(1, round(self.step_s * 1e6))}
        if self.api == "text":
            parameters = {"parameters": {**parameters, "max_new_tokens": tokens}}
        else:
            parameters["max_tokens"] = tokens
        data = msgspec.json.encode({**body, **parameters, "stream": self.is_stream})
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


def cases(
    apis: Sequence[str],
    connections: Sequence[int],
    *,
    rate: int,
    flood: int,
    seconds: float,
    requests: int,
) -> Iterator[Case]:
    """Yield the cases. Each runs for about `seconds` at its rate.

    requests: of one token, but at least as many as there are connections.
    """
    for api, is_stream in product(apis, (True, False)):
        paces = [(count, rate, False) for count in connections]
        if flood and is_stream:
            paces.append((max(connections), flood, True))
        for count, pace, is_flood in paces:
            case = Case(api, is_stream, count, pace, is_flood, 2, max(count, requests))
            yield replace(case, tokens=max(2, round(seconds / case.step_s)))
