"""The grammar of an answer's form, as llguidance takes it.

The front end checks it, so that a wrong one is refused at once; the engine constrains answers by
it (engine/sampling/grammars.py). The library is loaded with the first request that needs it.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import msgspec

from core.errors import RequestError
from core.structured_outputs import StructuredOutputsParams

FIELD = "structured_outputs"
"""What errors name, until whoever knows the client's own word puts it there."""
MAX_CHARACTERS = 2**20
JSON_SETTINGS = {"whitespace_pattern": r" |\n( {0,16}|\t{0,4})"}
"""Between the parts of a JSON text a blank may stand, or a new line with its indentation: left to
itself, a weak model goes on with blanks for ever."""
ASCII_CLASSES = "dws"
r"""In regular expressions \d, \w and \s stand for ASCII: a number in Bengali is seldom meant."""

_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)


def load_llguidance() -> ModuleType:
    """The library. Raises RequestError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(FIELD, "needs a package: pip install llguidance") from None
    return llguidance


def grammar_text(form: StructuredOutputsParams) -> str:
    """The grammar in llguidance's words, which is not checked yet.

    Raises RequestError where the form has none.
    """
    llguidance = load_llguidance()
    if form.json_object or form.json is not None:
        schema = {"type": "object"} if form.json is None else _schema(form.json)
        return _of_size(llguidance.LLMatcher.grammar_from_json_schema(_encoded(schema)))
    if form.regex is not None:
        regex = llguidance.regex_to_lark(form.regex, ASCII_CLASSES)
        return _of_size(f"start: /{regex}/")
    return _of_size(_choice(form.choice) if form.choice is not None else _lark(form.grammar or ""))


def checked(form: StructuredOutputsParams) -> StructuredOutputsParams:
    """The same as a grammar that llguidance takes; it has the same `grammar_text`.

    Raises RequestError that says what is wrong with it.
    """
    llguidance, text = load_llguidance(), grammar_text(form)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    error = llguidance.LLMatcher.validate_grammar(text, limits=limits)
    if error:
        raise grammar_error(error)
    return StructuredOutputsParams(grammar=text)


def grammar_error(message: str) -> RequestError:
    """What llguidance says, as one line."""
    return RequestError(FIELD, " ".join(message.split()))


def json_in_lark(schema: dict[str, Any]) -> str:
    """What in Lark's notation stands for a JSON text of that schema."""
    return f"%json {_encoded(schema)}"


def lark_text(text: str) -> str:
    """What in Lark's notation stands for a text."""
    return msgspec.json.encode(text).decode()


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.ValidationError:
        raise RequestError(FIELD, "a schema is an object") from None
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
    """GBNF in Lark's notation; other grammars as they are."""
    if not _GBNF.search(grammar):
        return grammar
    load_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # of a parser that raises what it comes upon
        raise grammar_error(str(error)) from None


def _of_size(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(FIELD, f"is longer than {MAX_CHARACTERS} characters")
    return text
