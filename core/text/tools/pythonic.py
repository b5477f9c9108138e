"""Llama 4 and Llama 3.2: the whole answer is a Python list of calls, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence

import msgspec

from core.text.tools.base import Piece, ToolCall
from core.text.tools.brackets import Brackets

_START, _END = "<|python_start|>", "<|python_end|>"
_MAY_BE_CALLS = re.compile(r"\[\s*([^\W\d][\w.]*(\s*\(.*)?)?", re.DOTALL)


class PythonicParser:
    """Parses calls at the start of the answer. Once anything else comes, the rest is text."""

    special_tokens: Sequence[str] = (_START, _END)

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False
        self._has_called = False
        self._brackets = Brackets(is_python=True)

    def notation(self, special_tokens: Collection[str]) -> None:
        """Return None: forced arguments are JSON, which these calls cannot hold."""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if self._is_text:
            return self._release()
        calls = self._held.lstrip().removeprefix(_START).lstrip()
        if self._has_called or _START.startswith(calls):
            return []
        if not _MAY_BE_CALLS.fullmatch(calls):
            return self._release()
        end = self._brackets.end(calls)
        return [] if end is None else self._parsed(calls, end)

    def flush(self) -> list[Piece]:
        has_no_text = self._has_called and self._held.strip() in ("", _END)
        return [] if has_no_text else self._release()

    def _parsed(self, text: str, end: int) -> list[Piece]:
        """Stop holding the text, and return the calls of the list that ends at `end`."""
        try:
            calls = _calls(text[:end])
        except ValueError:
            return self._release()
        self._has_called, self._held = True, text[end:]
        return [*calls]

    def _release(self) -> list[Piece]:
        self._is_text = True
        released, self._held = self._held, ""
        return [released] if released else []


def _calls(text: str) -> list[ToolCall]:
    """Parse a list of calls with literal arguments. Raises ValueError if it is anything else."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("not a list of calls")
        return [_call(item) for item in tree.elts]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a named argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ToolCall(ast.unparse(node.func), msgspec.json.encode(arguments).decode())
