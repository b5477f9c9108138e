"""The functions of the product that run for a request, and the statements of them that run."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from tests.measures import tree


@dataclass(frozen=True)
class Function:
    """A function that ran."""

    place: str
    """file:line name"""
    lines: int
    """From `def` to the end, without functions inside."""
    statements: int
    """Without the docstring and functions inside."""
    ran: int
    """Those of the statements that ran."""


@dataclass
class Trace:
    """What ran between `start` and `stop` in this thread and its greenlets.

    Greenlets and functions that are running when the trace starts are followed only if they began
    after `install`.
    """

    _lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The lines that ran, by file."""
    _begun: set[tuple[str, int]] = field(default_factory=set)
    """File and first line of the functions of which a line ran."""
    _is_on: bool = False

    def install(self) -> None:
        self._files = {str(path) for path in tree.files().values()}
        sys.settrace(self._enter)

    def start(self) -> None:
        self._is_on = True

    def stop(self) -> None:
        self._is_on = False
        sys.settrace(None)

    def functions(self) -> list[Function]:
        """Return the functions that ran, by file and line."""
        return [
            _function(Path(file), node, self._lines[file])
            for file, line in sorted(self._begun)
            if (node := _nodes(Path(file)).get(line))
        ]

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._is_on and event == "line":
            code = frame.f_code
            self._lines[code.co_filename].add(frame.f_lineno)
            self._begun.add((code.co_filename, code.co_firstlineno))
        return self._line


_Def = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _nodes(path: Path) -> dict[int, _Def]:
    """Return a file's functions by the first line of their code: of a decorator, if any."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _Def))
    return {
        min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in nodes
    }


def _function(path: Path, node: _Def, ran: set[int]) -> Function:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    statements = [statement for each in body for statement in _statements(each)]
    inner = [each for each in statements if isinstance(each, _Def)]
    return Function(
        f"{tree.name(path)}:{node.lineno} {node.name}",
        _span(node) - sum(map(_span, inner)),
        len(statements),
        sum(not ran.isdisjoint(_own_lines(each)) for each in statements),
    )


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement and those inside it, but not those of a function that it defines."""
    yield node
    if not isinstance(node, _Def):
        yield from _inside(node)


def _inside(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        yield from _statements(child) if isinstance(child, ast.stmt) else _inside(child)


def _own_lines(node: ast.stmt) -> range:
    """Return the lines of a statement, without those of the statements inside it."""
    end = (node.end_lineno or node.lineno) + 1
    return range(node.lineno, min((child.lineno for child in _inside(node)), default=end))


def _span(node: _Def) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
