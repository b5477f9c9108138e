"""LangChain's chat models for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import pydantic
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


class Verdict(pydantic.BaseModel, extra="forbid"):
    """Who speaks."""

    who: Literal["Romeo", "Juliet"]
    age: Annotated[int, pydantic.Field(ge=10, le=20)]


GREET = {
    "type": "function",
    "function": {
        "name": "greet",
        "description": "Greet someone.",
        "parameters": {
            "type": "object",
            "properties": {"who": {"type": "string", "enum": ["Romeo", "Juliet"]}},
            "required": ["who"],
            "additionalProperties": False,
        },
    },
}


def make(api: str, url: str, max_tokens: int = 16) -> Any:
    shared: Any = {"api_key": "none", "max_tokens": max_tokens, "max_retries": 0}
    if api == "messages":
        return ChatAnthropic(model_name="demo", base_url=url, **shared)
    uses = api == "responses"
    return ChatOpenAI(model="demo", base_url=f"{url}/v1", use_responses_api=uses, **shared)


APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


@APIS
def test_invoke(url: str, api: str) -> None:
    messages = [SystemMessage("Be kind."), HumanMessage("Speak.")]
    answer = make(api, url).invoke(messages)
    assert answer.text
    assert 0 < answer.usage_metadata["output_tokens"] <= 16


@APIS
def test_stream(url: str, api: str) -> None:
    assert "".join(chunk.text for chunk in make(api, url).stream("Speak."))


@APIS
def test_tools(url: str, api: str) -> None:
    model = make(api, url, 1000)
    answer = model.bind_tools([GREET], tool_choice="any").invoke("Speak.")
    assert {call["name"] for call in answer.tool_calls} == {"greet"}
    results = [ToolMessage("Hello.", tool_call_id=call["id"]) for call in answer.tool_calls]
    again = model.bind_tools([GREET]).invoke([HumanMessage("Speak."), answer, *results])
    assert again.type == "ai"


@APIS
def test_structured_output(url: str, api: str) -> None:
    answer = make(api, url, 1000).with_structured_output(Verdict).invoke("Speak.")
    assert isinstance(answer, Verdict)


@APIS
def test_chains(url: str, api: str) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be kind."), ("human", "{text}")])
    assert (prompt | make(api, url)).batch([{"text": "Speak."}, {"text": "Sing."}])


def test_async(url: str) -> None:
    async def ask() -> list[Any]:
        models = [make(api, url) for api in ("chat", "responses", "messages")]
        return await asyncio.gather(*(model.ainvoke("Speak.") for model in models))

    assert all(answer.text for answer in asyncio.run(ask()))
