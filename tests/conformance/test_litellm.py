"""litellm, as a client of servers with OpenAI's API and with Anthropic's API."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

USER: Any = [{"role": "user", "content": "Speak."}]
TOOLS: Any = [{"type": "function", "function": {"name": "greet", "parameters": {
    "type": "object", "properties": {"who": {"enum": ["Romeo"]}}, "required": ["who"],
    "additionalProperties": False,
}}}]  # fmt: skip


@pytest.fixture
def options(url: str) -> dict[str, Any]:
    base = f"{url}/v1"
    return {"model": "openai/demo", "api_base": base, "api_key": "none", "max_tokens": 16,
            "num_retries": 0}  # fmt: skip


def test_completion(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=USER, **options)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 16


def test_stream(options: dict[str, Any]) -> None:
    chunks: Any = litellm.completion(messages=USER, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_tool_call(options: dict[str, Any]) -> None:
    answer: Any = litellm.completion(
        messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        **{**options, "max_tokens": 1000},
    )  # fmt: skip
    assert answer.choices[0].message.tool_calls[0].function.name == "greet"


def test_text_completion(options: dict[str, Any]) -> None:
    model = {"model": "text-completion-openai/demo"}
    answer: Any = litellm.text_completion(prompt="ROMEO:", **{**options, **model})
    assert answer.choices[0].text


def test_responses(options: dict[str, Any]) -> None:
    named = {name: options[name] for name in ("model", "api_base", "api_key")}
    answer: Any = litellm.responses(input="Speak.", max_output_tokens=16, **named)
    assert answer.output[0].content[0].text


def test_streamed_responses(options: dict[str, Any]) -> None:
    named = {name: options[name] for name in ("model", "api_base", "api_key")}
    events: Any = litellm.responses(input="Speak.", max_output_tokens=16, stream=True, **named)
    assert [str(event.type) for event in events]


def test_anthropic(url: str) -> None:
    answer: Any = litellm.completion(
        model="anthropic/demo", api_base=url, api_key="none", messages=USER, max_tokens=8
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_streamed_anthropic(url: str) -> None:
    chunks: Any = litellm.completion(
        model="anthropic/demo", api_base=url, api_key="none", messages=USER, max_tokens=8,
        stream=True,
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_context_that_is_too_long(options: dict[str, Any]) -> None:
    long: Any = [{"role": "user", "content": "word " * 20000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **options)


def test_errors(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=USER, temperature=-1, **options)
