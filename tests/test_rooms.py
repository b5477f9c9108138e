"""How large folders are, and that no file imports itself by way of others (docs/design.md)."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FOLDERS_AT_THE_TOP = 14
MAX_MODULES_PER_FOLDER = 14
"""Without `__init__.py`."""
MAX_METHODS_PER_CLASS = 20
MANY_METHODS = {
    "Strategy": 25,  # the interface of all strategies, and what they share
    "PagedMemory": 23,  # the interface of KV memory, and the figures of the live page
}
"""Classes with more methods than that, which must not get more."""
MADE = {"build", "dist", "longshore.egg-info"}
"""Folders that tools make."""


def top_folders() -> list[Path]:
    visible = (path for path in ROOT.glob("[!.]*") if path.is_dir() and path.name not in MADE)
    return sorted(path for path in visible if path.name != "__pycache__")


def modules() -> Iterator[Path]:
    """Yield every Python file of the repository."""
    for folder in top_folders():
        yield from (path for path in folder.rglob("*.py") if "node_modules" not in path.parts)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, wherever in the file: of modules, or in modules."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return which modules each module imports. `from a import b` is of a.b, if that is a
    module."""
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        named = (other if other in files else other.rpartition(".")[0] for other in imported(path))
        found[name] = {other for other in named if other in files} - {name}
    return found


def test_the_top_level_fits_one_look() -> None:
    assert len(top_folders()) <= MAX_FOLDERS_AT_THE_TOP, [path.name for path in top_folders()]


@pytest.mark.parametrize("folder", sorted({path.parent for path in modules()}), ids=str)
def test_folders_are_small(folder: Path) -> None:
    names = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(names) <= MAX_MODULES_PER_FOLDER, sorted(names)


def test_classes_are_small() -> None:
    """Those of tests are as large as what they test."""
    found = [
        (node.name, sum(isinstance(item, ast.FunctionDef) for item in node.body))
        for path in modules()
        if not path.is_relative_to(ROOT / "tests")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    large = {name: count for name, count in found if count > MAX_METHODS_PER_CLASS}
    assert all(count <= MANY_METHODS.get(name, 0) for name, count in large.items()), large


def test_no_file_imports_itself_by_way_of_others() -> None:
    graphlib.TopologicalSorter(graph({name_of(path): path for path in modules()})).prepare()


def test_a_circle_is_found(tmp_path: Path) -> None:
    for name, text in {"a": "import b", "b": "def f():\n    from a import g"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    circle = graphlib.TopologicalSorter(graph({name: tmp_path / f"{name}.py" for name in "ab"}))
    with pytest.raises(graphlib.CycleError):
        circle.prepare()
