"""OpenAI's Python client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

USER: Any = [{"role": "user", "content": "Speak."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "greet",
            "parameters": {
                "type": "object",
                "properties": {"who": {"enum": ["Romeo", "Juliet"]}},
                "required": ["who"],
                "additionalProperties": False,
            },
        },
    }
]


class Verdict(pydantic.BaseModel):
    who: Literal["Romeo", "Juliet"]
    age: Annotated[int, pydantic.Field(ge=10, le=20)]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=USER, max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=USER, max_tokens=8, temperature=0)
    chunks = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert {len(token.top_logprobs) for token in logprobs.content or []} == {2}


def test_chat_tool_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=USER, tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.to_dict()["function"]["name"] == "greet"
    assert answer.choices[0].finish_reason == "tool_calls"


def test_chat_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="demo", messages=USER, response_format=Verdict)
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=["ROMEO:", "JULIET:"], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_completions_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="demo", prompt="ROMEO:", max_tokens=4, stream=True)
    )
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo", input="Speak.", max_output_tokens=16)
    assert response.status in ("completed", "incomplete")
    assert response.output_text


def test_response_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="Speak.", max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_response_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="demo", input="Speak.", max_output_tokens=16,
        include=["message.output_text.logprobs"], top_logprobs=3,
    )  # fmt: skip
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert all(len(token.top_logprobs) == 3 for token in part.logprobs)
    assert "".join(token.token for token in part.logprobs).strip() == part.text.strip()


def test_response_parse(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="demo", input="Speak.", text_format=Verdict)
    assert isinstance(response.output_parsed, Verdict)


def test_response_tool_call(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOLS[0]["function"], "strict": True}
    response = client.responses.create(
        model="demo", input="Speak.", tools=[tool], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = response.output
    assert call.type == "function_call"
    items: Any = [{"role": "user", "content": "Speak."}, call]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Hello."})
    again = client.responses.create(model="demo", input=items, tools=[tool], max_output_tokens=16)
    assert again.output


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=USER, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_async(url: str) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            create = client.chat.completions.create
            asked = [create(model="demo", messages=USER, max_tokens=4) for _ in range(8)]
            return [answer.choices[0].finish_reason for answer in await asyncio.gather(*asked)]

    assert set(asyncio.run(ask())) <= {"stop", "length"}


@pytest.fixture
def vision(vision_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{vision_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_image(vision: openai.OpenAI, picture: str) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    shown: Any = [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]
    answer = vision.chat.completions.create(model="m", messages=shown, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 20


def test_responses_image(vision: openai.OpenAI, picture: str) -> None:
    url = f"data:image/png;base64,{picture}"
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    shown: Any = [{"role": "user", "content": [{"type": "input_text", "text": "See"}, image]}]
    answer = vision.responses.create(model="m", input=shown, max_output_tokens=4)
    assert answer.usage is not None
    assert answer.usage.input_tokens > 20


def test_responses_image_of_a_tool(vision: openai.OpenAI, picture: str) -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    items: Any = [
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [image]},
    ]
    answer = vision.responses.create(model="m", input=items, max_output_tokens=4)
    assert answer.usage is not None
    assert answer.usage.input_tokens > 20
