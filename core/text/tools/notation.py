"""Grammars for answers that must be tool calls, in the model's format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.structured_outputs import StructuredOutputsParams
from core.text.grammar import json_in_lark, lark_text


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON Schema of the arguments, which are an object."""


@dataclass(frozen=True, slots=True)
class Notation:
    """The format in which a model writes calls, with the whitespace it was trained on.

    ```
    opening  head  {...}  tail  separator  head  {...}  tail  closing
    ```
    """

    head: Callable[[str], str]
    """Takes a function's name and returns the text before the arguments."""
    tail: str
    """The text after the arguments."""
    separator: str
    opening: str = ""
    closing: str = ""

    def form(
        self, functions: Sequence[Function], special_tokens: Mapping[str, int], *, is_single: bool
    ) -> StructuredOutputsParams:
        """Return the constraint for an answer of one or more calls to these functions.

        special_tokens: maps text to id. Where the format has such a text, the model must generate
        the special token, not other tokens that spell it.
        is_single: allow exactly one call.
        """

        def lark(text: str) -> str:
            return _lark(text, special_tokens)

        more = "" if is_single else f"({lark(self.separator)} call)*"
        rules = [
            f"start: {lark(self.opening)} call {more} {lark(self.closing)}",
            "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
        ]
        for index, function in enumerate(functions):
            head, tail = lark(self.head(function.name)), lark(self.tail)
            rules.append(f"call_{index}: {head} arguments_{index} {tail}")
            rules.append(f"arguments_{index}: {json_in_lark(dict(function.parameters))}")
        return StructuredOutputsParams(grammar="\n".join(rules))


def json_head(key: str) -> Callable[[str], str]:
    """Return a `Notation.head`: the start of a JSON object, up to the arguments after `key`."""
    return lambda name: f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '


def _lark(text: str, special_tokens: Mapping[str, int]) -> str:
    if not special_tokens:
        return lark_text(text) if text else ""
    marks = "|".join(map(re.escape, special_tokens))
    parts = re.split(f"({marks})", text)
    return " ".join(
        f"<[{special_tokens[part]}]>" if part in special_tokens else lark_text(part)
        for part in parts
        if part
    )
