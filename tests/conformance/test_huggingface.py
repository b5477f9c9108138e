"""huggingface_hub's InferenceClient."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

USER: Any = [{"role": "user", "content": "Speak."}]
SCHEMA = {
    "type": "object", "properties": {"who": {"enum": ["Romeo", "Juliet"]}}, "required": ["who"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "greet", "parameters": SCHEMA}}


@pytest.fixture
def client(url: str) -> InferenceClient:
    return InferenceClient(url)


def test_chat(client: InferenceClient) -> None:
    assert client.chat_completion(USER, max_tokens=8).choices[0].message.content


def test_chat_stream(client: InferenceClient) -> None:
    chunks = client.chat_completion(USER, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_chat_by_openais_method_name(client: InferenceClient) -> None:
    answer = client.chat.completions.create(messages=USER, max_tokens=8, model=None)
    assert answer.choices[0].message.content


def test_chat_schema(client: InferenceClient) -> None:
    form: Any = {"type": "json", "value": SCHEMA}
    content = client.chat_completion(USER, response_format=form).choices[0].message.content
    assert '"who"' in content


def test_chat_tool_call(client: InferenceClient) -> None:
    choice: Any = {"type": "function", "function": {"name": "greet"}}
    message = client.chat_completion(USER, tools=[TOOL], tool_choice=choice).choices[0].message
    assert message.tool_calls[0].function.name == "greet"


def test_chat_logprobs(client: InferenceClient) -> None:
    answer = client.chat_completion(USER, max_tokens=2, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content) in (1, 2)


def test_text(client: InferenceClient) -> None:
    assert client.text_generation("ROMEO:", max_new_tokens=8)


def test_text_details(client: InferenceClient) -> None:
    answer = client.text_generation("ROMEO:", max_new_tokens=8, details=True)
    assert answer.details.finish_reason in ("eos_token", "length")


def test_text_stream(client: InferenceClient) -> None:
    tokens = list(client.text_generation("ROMEO:", max_new_tokens=8, stream=True, details=True))
    assert 0 < len(tokens) <= 8


def test_text_grammar(client: InferenceClient) -> None:
    grammar: Any = {"type": "json", "value": SCHEMA}
    assert '"who"' in client.text_generation("ROMEO:", max_new_tokens=1000, grammar=grammar)


def test_errors(client: InferenceClient) -> None:
    with pytest.raises(HfHubHTTPError):
        client.chat_completion(USER, temperature=-1)
