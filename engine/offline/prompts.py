"""The types of prompts that `LLM` takes: texts and token ids, in the forms that vLLM takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar, cast

from core.errors import RequestError
from core.text.tokenizer import Tokenizer

T = TypeVar("T")


class TextPrompt(TypedDict):
    """A text prompt as a dict."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, and optionally their text."""

    prompt_token_ids: Sequence[int]
    prompt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A single prompt becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def per_prompt(argument: str, given: T | Sequence[T], count: int) -> list[T]:
    """Return what each of `count` prompts gets: the same, or its entry of a list.

    Raises RequestError, naming the argument, if the list has another length.
    """
    if not isinstance(given, Sequence):
        return [given] * count
    of_each = list(cast(Sequence[T], given))
    if len(of_each) != count:
        raise RequestError(argument, f"{len(of_each)} given for {count} prompts")
    return of_each


def encoded(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """Return the prompt's text (None if only its token ids were given) and its token ids.

    Raises RequestError for a dict with other keys, and for text if there is no tokenizer.
    """
    if isinstance(prompt, Mapping):
        return _encoded_fields(cast(Mapping[str, object], prompt), tokenizer)
    if not isinstance(prompt, str):
        return None, list(prompt)
    if tokenizer is None:
        raise RequestError("prompt", "the model has no tokenizer.json; give token ids")
    return prompt, tokenizer.encode(prompt)


def _encoded_fields(
    fields: Mapping[str, object], tokenizer: Tokenizer | None
) -> tuple[str | None, list[int]]:
    if not fields or not fields.keys() <= {"prompt", "prompt_token_ids"}:
        raise RequestError("prompt", "the only keys of a dict are prompt and prompt_token_ids")
    text = cast(str | None, fields.get("prompt"))
    token_ids = cast(Sequence[int] | None, fields.get("prompt_token_ids"))
    return encoded(text or "", tokenizer) if token_ids is None else (text, list(token_ids))
