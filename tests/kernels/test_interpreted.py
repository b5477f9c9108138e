"""Runs the folder interpreted/ in a process with TRITON_INTERPRET=1; see its conftest.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MATRIX_CASES

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[2]


@pytest.mark.timeout(1800)
@pytest.mark.matrix
def test_the_kernels_in_the_interpreter(pytestconfig, record_property):
    """The folder's tests share a process, since importing torch and transformers takes seconds."""
    options = ["-m", pytestconfig.option.markexpr, *["--matrix"] * pytestconfig.option.matrix]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *options, FOLDER],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        pytest.fail(f"{run.stdout}\n{run.stderr}", pytrace=False)
    (summary,) = re.findall(r"^matrix: ([\d,]+) of ([\d,]+) cases", run.stdout, re.MULTILINE)
    record_property(MATRIX_CASES, [int(number.replace(",", "")) for number in summary])
