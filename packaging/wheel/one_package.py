"""The build backend: setuptools, with all packages moved below `longshore` in a wheel.

In the repository, `core`, `engine` and the others are top-level packages. Installed beside other
people's packages, such names would collide. So `build_wheel` copies the packages into a folder
`longshore` in a temporary directory, rewrites their imports of each other, and runs setuptools in
that directory. Editable installs and source distributions are setuptools' own (docs/design.md,
«Names»).
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import setuptools.build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]

PARENT = "longshore"
PACKAGES = frozenset(
    ("benchmarks", "container", "core", "deploy", "engine", "kernels", "loadtest", "strategies")
)
"""The packages that move. Imports of all other modules stay as they are."""
MOVED = (
    *sorted(PACKAGES - {"benchmarks"}),
    *(f"benchmarks/{name}" for name in ("__init__.py", "advise", "load", "replay")),
    "models/demo",
)  # fmt: skip
"""What moves below `longshore`. Of the benchmarks, only those parts move that `longshore replay`
and `advise` need."""
KEPT = ("LICENSE", "README.md", "pyproject.toml", PARENT)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str | list[str] | None] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel and return its name, as PEP 517 asks.

    With the setting `kernels=yes`, it has the CPU kernels for this architecture, compiled by $CXX
    or g++, and its name has the platform. Where they do not load, the source is compiled.
    """
    target, settings = Path(wheel_directory).resolve(), dict(config_settings or {})
    has_kernels = settings.pop("kernels", "no") == "yes"
    with tempfile.TemporaryDirectory() as folder:
        stage(Path.cwd(), Path(folder))
        if has_kernels:
            _compile_kernels(Path(folder))
            settings["--build-option"] = f"--plat-name {sysconfig.get_platform()}"
        with contextlib.chdir(folder):
            return setuptools.build_meta.build_wheel(str(target), settings)


def stage(root: Path, folder: Path) -> None:
    """Copy the files of a wheel from the repository, `root`, into an empty folder."""
    for name in KEPT:
        _copy(root / name, folder / name)
    for name in MOVED:
        _copy(root / name, folder / PARENT / name)
    for path in (folder / PARENT).rglob("*.py"):
        path.write_text(with_full_names(path.read_text("utf-8"), str(path)), "utf-8")


def _compile_kernels(folder: Path) -> None:
    """Compile the CPU kernels of a staged wheel into their package."""
    package = folder / PARENT / "kernels" / "cpu"
    command = [sys.executable, "-m", f"{PARENT}.kernels.cpu"]
    variables = {**os.environ, "LONGSHORE_CACHE": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=folder, env=variables, check=True)


def with_full_names(source: str, filename: str) -> str:
    """Return the code with `longshore.` before the names of our packages in its imports.

    Raises ValueError for `import core.configuration.options`, which binds `core`: the code after
    it would need changes too.
    """
    lines = source.encode().splitlines(keepends=True)  # ast counts columns in bytes
    # Edit from the end, so that the positions of earlier names stay valid.
    for line, column in sorted(_places(ast.parse(source, filename), filename), reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + f"{PARENT}.".encode() + text[column:]
    return b"".join(lines).decode()


def _places(tree: ast.Module, filename: str) -> Iterator[tuple[int, int]]:
    """Yield line and column of each of our packages' names in an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            yield node.lineno, node.col_offset + len("from ")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name) and alias.asname is None:
                    raise ValueError(
                        f"{filename}:{alias.lineno}: import {alias.name} cannot be moved below "
                        f"{PARENT}; write from ... import ..., or import ... as ..."
                    )
                if _is_ours(alias.name):
                    yield alias.lineno, alias.col_offset


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
