"""The constraint on the form of an answer."""

from __future__ import annotations

from typing import Any

import msgspec

from core.configuration.checked import Checked
from core.errors import RequestError


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=Checked):
    """Exactly one of these constraints. The names are vLLM's.

    core/text/grammar.py converts it to a grammar. The constructor raises RequestError, naming the
    field, for an unknown field, for a value of the wrong type or an empty `choice`, and if not
    exactly one constraint is set.
    """

    json: str | dict[str, Any] | None = None
    """A JSON Schema, as an object or as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    r"""A regular expression that the whole answer matches, in the syntax of Rust's regex crate,
    without look-around and back-references. \d, \w and \s match ASCII only."""
    choice: tuple[str, ...] | None = None
    """The texts that the answer may be."""
    grammar: str | None = None
    """A grammar in Lark syntax with the rule `start`, or in GBNF with the rule `root`."""

    def __post_init__(self) -> None:
        forms = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(form is not None for form in forms) != 1:
            raise RequestError(
                "structured_outputs",
                "expected exactly one of json, json_object, regex, choice and grammar",
            )
        if self.choice == ():
            raise RequestError("choice", "must have at least one text")


GuidedDecodingParams = StructuredOutputsParams
"""The name in older vLLM versions, whose SamplingParams has a field `guided_decoding` for it."""
