"""Runs the folder interpreted/ in a process with TRITON_INTERPRET=1; see its conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[2]


@pytest.mark.timeout(1800)
def test_the_kernels_in_the_interpreter():
    """The folder's tests share a process, since importing torch and transformers takes seconds."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", FOLDER],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        pytest.fail(f"{run.stdout}\n{run.stderr}", pytrace=False)
