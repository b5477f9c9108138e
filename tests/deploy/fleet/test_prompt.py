"""The parts of requests that routers read: sessions, and the beginnings of prompts."""

from __future__ import annotations

import json

import pytest

from core.routing import RoutedRequest
from deploy.fleet.front.prompt import routed_request
from deploy.fleet.http_message import Request

SYSTEM = "You answer in verse. " * 100
"""Longer than the shortest prefix that routers compare."""


def routed(body: object, path: bytes = b"/invocations", **headers: str) -> RoutedRequest:
    given = {"content-type": "application/json", **headers}
    encoded = tuple((name.replace("_", "-").encode(), it.encode()) for name, it in given.items())
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return routed_request(Request("POST", path, encoded, data))


def chat(*contents: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text} for text in contents], **fields}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"inputs": SYSTEM + "a"}, {"inputs": SYSTEM + "b"}),
        ({"prompt": [*range(200), 7]}, {"prompt": [*range(200), 8]}),
        (chat(SYSTEM, "a"), chat(SYSTEM, "b", "c")),
        ({"system": SYSTEM, **chat("a")}, {"system": SYSTEM, **chat("b")}),
        ({"instructions": SYSTEM, "input": "a"}, {"instructions": SYSTEM, "input": "b"}),
        (chat("a", tools=[{"name": SYSTEM}]), chat("b", tools=[{"name": SYSTEM}])),
    ],
)
def test_prompts_that_begin_alike_have_a_prefix_in_common(one: dict, other: dict):
    prefixes = routed(one).prefixes
    assert prefixes
    assert prefixes[0] == routed(other).prefixes[0]


@pytest.mark.parametrize(
    "other",
    [{"inputs": "Not " + SYSTEM}, {"inputs": SYSTEM, "adapters": "sql"},
     {"inputs": SYSTEM, "model": "other"}],
)  # fmt: skip
def test_other_prompts_and_other_adapters_have_no_prefix_in_common(other: dict):
    assert not set(routed({"inputs": SYSTEM}).prefixes) & set(routed(other).prefixes)


def test_the_header_may_name_the_adapter_too():
    other = routed({"inputs": SYSTEM}, x_amzn_sagemaker_adapter_identifier="sql")
    assert not set(routed({"inputs": SYSTEM}).prefixes) & set(other.prefixes)


@pytest.mark.parametrize(("given", "session"), [("abc", "abc"), ("NEW_SESSION", None)])
def test_a_session_is_known_by_its_header(given: str, session: str | None):
    assert routed({"inputs": "a"}, x_amzn_sagemaker_session_id=given).session == session


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 10_000, b"\xff", b"[]"])
def test_a_body_that_the_container_will_refuse_has_no_prefix(body: bytes):
    assert routed(body) == RoutedRequest(None, ())


def test_a_plain_text_is_a_prompt():
    plain = routed(SYSTEM.encode(), **{"content-type": "text/plain; charset=utf-8"})
    assert plain.prefixes == routed({"inputs": SYSTEM}).prefixes
