"""Anthropic's Python client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

USER: Any = [{"role": "user", "content": "Speak."}]
TOOLS: Any = [
    {
        "name": "greet",
        "description": "Greets someone.",
        "input_schema": {
            "type": "object",
            "properties": {"who": {"enum": ["Romeo", "Juliet"]}},
            "required": ["who"],
            "additionalProperties": False,
        },
    }
]
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="demo", max_tokens=8, messages=USER, system="Be kind.")
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 8
    assert message.content[0].type == "text"


def test_stream_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="demo", max_tokens=8, messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].to_dict()["text"] == text
    assert final.stop_reason in ("end_turn", "max_tokens")


def test_stream_events(client: anthropic.Anthropic) -> None:
    events = [
        event.type
        for event in client.messages.create(model="demo", max_tokens=8, messages=USER, stream=True)
    ]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


def test_stop_sequence(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="demo", max_tokens=200, messages=USER, stop_sequences=["e"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")


def test_tool_use(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="demo", max_tokens=1000, messages=USER, tools=TOOLS, tool_choice=ONE
    )
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.input["who"] in ("Romeo", "Juliet")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Hello."}
    turns: Any = [
        *USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(model="demo", max_tokens=8, messages=turns, tools=TOOLS)
    assert again.role == "assistant"


def test_streamed_tool_use(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="demo", max_tokens=1000, messages=USER, tools=TOOLS, tool_choice=ONE
    ) as stream:
        final = stream.get_final_message()
    (call,) = final.content
    assert call.type == "tool_use"
    assert call.input["who"] in ("Romeo", "Juliet")


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="demo", messages=USER, system="Be kind.")
    message = client.messages.create(model="demo", max_tokens=1, messages=USER, system="Be kind.")
    assert counted.input_tokens == message.usage.input_tokens


def test_prefill(client: anthropic.Anthropic) -> None:
    turns: Any = [*USER, {"role": "assistant", "content": "Good"}]
    assert client.messages.create(model="demo", max_tokens=4, messages=turns).content


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model="demo", max_tokens=4, messages=USER, extra_body={"temperature": -1}
        )


def test_any_model_name(client: anthropic.Anthropic) -> None:
    assert client.messages.create(model="any-name", max_tokens=4, messages=USER).model == "demo"


@pytest.fixture
def vision(vision_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=vision_url, api_key="none", max_retries=0) as client:
        yield client


def image(data: str) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def test_image(vision: anthropic.Anthropic, picture: str) -> None:
    text = {"type": "text", "text": "What is this?"}
    shown: Any = [{"role": "user", "content": [image(picture), text]}]
    hidden: Any = [{"role": "user", "content": [text]}]
    message = vision.messages.create(model="m", max_tokens=4, messages=shown)
    counted = vision.messages.count_tokens(model="m", messages=shown).input_tokens
    without = vision.messages.count_tokens(model="m", messages=hidden).input_tokens
    assert message.usage.input_tokens == counted > without


def test_image_of_a_tool(vision: anthropic.Anthropic, picture: str) -> None:
    use: Any = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "1", "content": [image(picture)]}
    turns: Any = [
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    with vision.messages.stream(model="m", max_tokens=4, messages=turns) as stream:
        assert stream.get_final_message().usage.output_tokens > 0


def test_no_address_is_fetched(vision: anthropic.Anthropic) -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
    shown: Any = [{"role": "user", "content": [block]}]
    with pytest.raises(anthropic.BadRequestError, match="addresses are not fetched"):
        vision.messages.create(model="m", max_tokens=4, messages=shown)
