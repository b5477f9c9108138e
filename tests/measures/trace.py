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
    """file:line"""
    name: str
    """With its class."""
    lines: int
    """From `def` to the end, without functions inside."""
    statements: int
    """Without the docstring and functions inside."""
    ran: int
    """Those of the statements that ran."""
    depth: int
    """How many functions of the product were running when it was first called."""


@dataclass
class Trace:
    """What ran between `start` and `stop` in this thread and its greenlets.

    Greenlets and functions that are running when the trace starts are followed only if they began
    after `install`.
    """

    _lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The lines that ran, by file."""
    _begun: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    """Name and depth of the functions of which a line ran, by file and first line."""
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
        """Return the functions that ran, in the order of their first calls."""
        return [
            _function(Path(file), node, self._lines[file], *begun)
            for (file, line), begun in self._begun.items()
            if (node := _nodes(Path(file)).get(line))
        ]

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._is_on and event == "line":
            code = frame.f_code
            self._lines[code.co_filename].add(frame.f_lineno)
            key = code.co_filename, code.co_firstlineno
            if key not in self._begun:
                name = code.co_qualname.replace("<locals>.", "")
                self._begun[key] = name, self._depth(frame)
        return self._line

    def _depth(self, frame: FrameType) -> int:
        """Return how many of the functions that called this one are functions of the product."""
        depth, caller = 0, frame.f_back
        while caller is not None:
            code, caller = caller.f_code, caller.f_back
            depth += code.co_filename in self._files and not code.co_name.startswith("<")
        return depth


_Def = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _nodes(path: Path) -> dict[int, _Def]:
    """Return a file's functions by the first line of their code: of a decorator, if any."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _Def))
    return {
        min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in nodes
    }


def _function(path: Path, node: _Def, ran: set[int], name: str, depth: int) -> Function:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    statements = [statement for each in body for statement in _statements(each)]
    inner = [each for each in statements if isinstance(each, _Def)]
    return Function(
        f"{tree.name(path)}:{node.lineno}",
        name,
        _span(node) - sum(map(_span, inner)),
        len(statements),
        sum(not ran.isdisjoint(_own_lines(each)) for each in statements),
        depth,
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
