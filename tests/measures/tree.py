"""The product's Python files by module name, and what importing each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "strategies", "engine", "container", "kernels")
"""The packages that a request crosses. No other package is imported by any of them."""


@cache
def files() -> dict[str, Path]:
    """Return every Python file of these packages by the name of its module."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {_module(path): path for path in paths}


def name(path: Path) -> str:
    """Return a file's path as people write it, from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def closure(door: str) -> set[str]:
    """Return the modules that `import door` imports, itself among them.

    Static: imports inside functions, and those for type checkers only, do not count. Nor do
    packages around a module, whose `__init__.py` are mostly docstrings.
    """
    found, left = set[str](), [door]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += imports(module)
    return found


@cache
def imports(module: str, *, everywhere: bool = False) -> frozenset[str]:
    """Return what a module imports of ours as it is loaded; `everywhere`: in functions, too, and
    for type checkers."""
    tree = ast.parse(files()[module].read_text())
    named = (
        {name for node in ast.walk(tree) for name in _named(node)}
        if everywhere
        else {*_named(tree)}
    )
    parents = {other.rpartition(".")[0] for other in named - files().keys()}
    return frozenset((named | parents) & files().keys())


def _named(node: ast.AST) -> Iterator[str]:
    """Yield what a module imports as it is loaded: modules, or names in modules."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.If() if "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            case ast.Import():
                yield from (alias.name for alias in child.names)
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in child.names)
            case _:
                yield from _named(child)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
