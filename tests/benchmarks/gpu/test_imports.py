"""Imports that work on a GPU machine without the service's packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
KERNELS_ALONE = {*sys.stdlib_module_names, "torch", "triton", "benchmarks", "kernels"}
WHOLE_ENGINES = KERNELS_ALONE | {"core", "engine", "strategies", "transformers"}
FOLDERS = ("kernels", "benchmarks/gpu", "benchmarks/engine")
BESIDE_THE_ENGINE = ("experts", "quantized", "sampling")
"""Sections of kernels that also run the engine's parts around them, and need its packages."""
OF_AN_IMAGE = {"precompile": {"tqdm"}}
"""A command for image builds, and the package that it alone imports."""
SERVICE = ("flask", "gunicorn", "gevent", "zmq", "javaproperties", "locust")
BLOCK = f"""
import importlib, sys
for name in {SERVICE}:
    sys.modules[name] = None
"""


def test_kernels_and_their_sections_need_torch_and_triton_only():
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        is_alone = "engine" not in path.parts and path.stem not in BESIDE_THE_ENGINE
        allowed = KERNELS_ALONE if is_alone else WHOLE_ENGINES
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            foreign = {name.split(".")[0] for name in names} - allowed
            assert foreign <= OF_AN_IMAGE.get(path.stem, set()), path


def test_every_section_loads_without_the_service():
    modules = sorted({section.module for section in SECTIONS.values()})
    code = f"{BLOCK}\nfor name in {modules}: importlib.import_module('benchmarks.gpu.' + name)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", ["__main__", "sections", "shapes", "report"])
def test_the_parent_process_loads_without_torch(module):
    code = f"import sys; import benchmarks.gpu.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
