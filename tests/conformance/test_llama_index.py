"""LlamaIndex's models for servers with OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import pydantic
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

MESSAGES = [ChatMessage(role="system", content="Be kind."), ChatMessage("Speak.")]


class Verdict(pydantic.BaseModel, extra="forbid"):
    """Who speaks."""

    who: Literal["Romeo", "Juliet"]
    age: Annotated[int, pydantic.Field(ge=10, le=20)]


class Greet(pydantic.BaseModel, extra="forbid"):
    """Greet someone."""

    who: Literal["Romeo", "Juliet"]


TOOL = FunctionTool.from_defaults(lambda who: f"Hello, {who}.", name="greet", fn_schema=Greet)


@pytest.fixture(params=["completions", "chat", "responses"])
def llm(request: pytest.FixtureRequest, url: str) -> Any:
    return make(request.param, url)


def make(api: str, url: str, max_tokens: int = 16) -> Any:
    # Without `strict`, tools may have any further properties, and the demo model never stops.
    shared: Any = {"model": "demo", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0,
                   "strict": True}  # fmt: skip
    if api == "responses":
        return OpenAILikeResponses(
            max_output_tokens=max_tokens, is_function_calling_model=True, **shared
        )
    is_chat = api == "chat"
    return OpenAILike(
        max_tokens=max_tokens, is_chat_model=is_chat, is_function_calling_model=is_chat, **shared
    )


def test_complete(llm: Any) -> None:
    assert llm.complete("Speak.").text


def test_stream_complete(llm: Any) -> None:
    assert "".join(part.delta or "" for part in llm.stream_complete("Speak."))


def test_chat(llm: Any) -> None:
    assert llm.chat(MESSAGES).message.content


def test_stream_chat(llm: Any) -> None:
    assert "".join(part.delta or "" for part in llm.stream_chat(MESSAGES))


def test_async_chat(llm: Any) -> None:
    assert asyncio.run(llm.achat(MESSAGES)).message.content


def test_async_stream_chat(llm: Any) -> None:
    async def collect() -> str:
        return "".join([part.delta or "" async for part in await llm.astream_chat(MESSAGES)])

    assert asyncio.run(collect())


TOOL_APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@TOOL_APIS
def test_chat_with_tools(url: str, api: str) -> None:
    llm = make(api, url, max_tokens=1000)
    answer = llm.chat_with_tools([TOOL], user_msg="Speak.", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "greet"
    assert call.tool_kwargs["who"] in ("Romeo", "Juliet")


@TOOL_APIS
def test_predict_and_call(url: str, api: str) -> None:
    llm = make(api, url, max_tokens=1000)
    answer = llm.predict_and_call([TOOL], user_msg="Speak.", tool_required=True)
    assert "Hello" in str(answer)


@TOOL_APIS
def test_structured_output(url: str, api: str) -> None:
    llm = make(api, url, max_tokens=1000).as_structured_llm(Verdict)
    assert isinstance(llm.complete("Who speaks?").raw, Verdict)
