"""What a GPU machine without the service's packages can import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {*sys.stdlib_module_names, "torch", "triton", "benchmarks", "kernels"}


def test_benchmarks_and_kernels_need_torch_and_triton_only():
    for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "kernels").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= ALLOWED, path
