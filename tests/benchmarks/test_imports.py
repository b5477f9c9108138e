"""Imports that work on a GPU machine without the service's packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
KERNELS_ALONE = {*sys.stdlib_module_names, "torch", "triton", "benchmarks", "kernels"}
WHOLE_ENGINES = KERNELS_ALONE | {"core", "engine", "strategies", "transformers"}
SERVING = (
    "accuracy", "accuracy_by_family", "closed_loop", "engines", "experts", "generate", "host",
    "host_step", "mixed", "profile", "quantized", "ranks", "roofline", "sampling", "serve",
    "small_pool", "start", "steady_decode", "two_gpus", "watching",
)  # fmt: skip
"""Files of benchmarks/ that run the engine or its parts and need its packages."""
OF_AN_IMAGE = {"precompile": {"tqdm"}}
"""A command for image builds, and the package that it alone imports."""
SERVICE = ("flask", "gunicorn", "gevent", "zmq", "javaproperties", "locust")
BLOCK = f"""
import importlib, sys
for name in {SERVICE}:
    sys.modules[name] = None
"""


def test_kernels_and_their_sections_need_torch_and_triton_only():
    for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        allowed = WHOLE_ENGINES if path.stem in SERVING else KERNELS_ALONE
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
    code = f"{BLOCK}\nfor name in {modules}: importlib.import_module('benchmarks.' + name)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", ["gpu", "sections", "shapes", "report"])
def test_the_parent_process_loads_without_torch(module):
    code = f"import sys; import benchmarks.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
