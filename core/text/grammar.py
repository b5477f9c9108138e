"""Grammars for structured outputs, in the format of llguidance.

A helper process beside each worker first converts and compiles every grammar
(container/isolation/). So a grammar that crashes llguidance harms no other request. Then the engine
constrains answers with the grammar (engine/sampling/grammars.py). llguidance is imported by the
first request that needs it.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import msgspec

from core.configuration.limits import GRAMMAR
from core.errors import LongshoreError, RequestError
from core.foreign_code import contained
from core.structured_outputs import StructuredOutputsParams

FIELD = "structured_outputs"
"""The field in errors. Callers replace it with the client's own name for the field."""
JSON_SETTINGS = {"whitespace_pattern": r" |\n( {0,16}|\t{0,4})"}
"""Whitespace in JSON: one space, or a newline with its indentation. Without a limit, a weak model
may generate whitespace forever."""
ASCII_CLASSES = "dws"
r"""Classes that match ASCII only in regular expressions: \d seldom means Bengali digits."""

_GBNF = re.compile(r"^[^\S\n]*root\s*::=", re.MULTILINE)


def load_llguidance() -> ModuleType:
    """Import llguidance. Raises RequestError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(FIELD, "needs a package: pip install llguidance") from None
    return llguidance


def grammar_text(form: StructuredOutputsParams) -> str:
    """Convert a constraint to a grammar of llguidance. The grammar may still be invalid.

    Raises RequestError if the constraint cannot be converted.
    """
    with converting_errors():
        return _grammar_text(form)


def _grammar_text(form: StructuredOutputsParams) -> str:
    llguidance = load_llguidance()
    if form.json_object or form.json is not None:
        schema = {"type": "object"} if form.json is None else _schema(form.json)
        return _of_size(llguidance.LLMatcher.grammar_from_json_schema(_encoded(schema)))
    if form.regex is not None:
        regex = llguidance.regex_to_lark(form.regex, ASCII_CLASSES)
        return _of_size(f"start: /{regex}/")
    return _of_size(_choice(form.choice) if form.choice is not None else _lark(form.grammar or ""))


def grammar_error(message: str) -> RequestError:
    """Return an error with the message of llguidance on one line."""
    return RequestError(FIELD, " ".join(message.replace("<non-verbose/>", "").split()))


@contextmanager
def converting_errors() -> Generator[None]:
    """Turn whatever llguidance raises into a RequestError. A MemoryError stays as it is."""
    try:
        with contained:
            yield
    except (LongshoreError, MemoryError):
        raise
    except Exception as error:
        raise grammar_error(str(error)) from error


def json_in_lark(schema: dict[str, Any]) -> str:
    """Return the Lark expression for JSON that follows a schema."""
    return f"%json {_encoded(schema)}"


def lark_text(text: str) -> str:
    """Return the Lark string literal for a text."""
    return msgspec.json.encode(text).decode()


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.ValidationError:
        raise RequestError(FIELD, "a schema must be an object") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(FIELD, f"the schema is not JSON: {error}") from None


def _encoded(schema: dict[str, Any]) -> str:
    schema = {**schema, "x-guidance": JSON_SETTINGS}
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise RequestError(FIELD, "the schema is nested too deeply") from None


def _choice(texts: tuple[str, ...]) -> str:
    return "start: " + " | ".join(map(lark_text, texts))


def _lark(grammar: str) -> str:
    """Convert a GBNF grammar to Lark; return other grammars unchanged."""
    if not _GBNF.search(grammar):
        return grammar
    load_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(grammar)


def _of_size(text: str) -> str:
    GRAMMAR.check(FIELD, len(text))
    return text
