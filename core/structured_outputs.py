"""What an answer must look like."""

from __future__ import annotations

from typing import Any

import msgspec

from core.checked import Checked
from core.errors import RequestError


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=Checked):
    """One of these forms. Names are vLLM's; core/text/grammar.py makes a grammar of it.

    Raises RequestError, naming the field, as SamplingParams does, and for none or several of them.
    """

    json: str | dict[str, Any] | None = None
    """A JSON Schema, or the text of one."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    r"""A regular expression that all of the answer matches, in the syntax of Rust's regex crate:
    without look-around and back-references. \d, \w and \s stand for ASCII."""
    choice: tuple[str, ...] | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in Lark's notation with the rule `start`, or in GBNF with `root ::=`."""

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
"""Its name in older scripts, whose SamplingParams have it as `guided_decoding`."""
