"""instructor, in its modes for servers with structured output or tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import instructor
import openai
import pydantic
import pytest

USER: Any = [{"role": "user", "content": "Who speaks?"}]


class Verdict(pydantic.BaseModel, extra="forbid"):
    """Without `extra`, the demo model would add properties without end."""

    who: Literal["Romeo", "Juliet"]
    age: Annotated[int, pydantic.Field(ge=10, le=20)]


def client(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_a_model(url: str, mode: instructor.Mode) -> None:
    verdict = client(url, mode).chat.completions.create(
        model="demo", messages=USER, response_model=Verdict, max_retries=0
    )
    assert verdict.who in ("Romeo", "Juliet")


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_partial_models(url: str, mode: instructor.Mode) -> None:
    *_, last = client(url, mode).chat.completions.create_partial(
        model="demo", messages=USER, response_model=Verdict, max_retries=0
    )
    assert last.who in ("Romeo", "Juliet")


def test_the_raw_answer(url: str) -> None:
    verdict, raw = client(url, instructor.Mode.JSON_SCHEMA).chat.completions.create_with_completion(
        model="demo", messages=USER, response_model=Verdict, max_retries=0
    )
    assert verdict.who in raw.choices[0].message.content
