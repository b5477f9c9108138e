"""A container with the demo model, and examples run as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.serving import ROOT, Container, serve

NUM_NEW = 20
"""Tokens that each client requests."""


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    options = "option.dtype=fp32\noption.local_runtime_api=true\n"
    with serve(tmp_path_factory.mktemp("examples"), options) as container:
        yield container


def run_example(*command: str) -> str:
    """Run an example and return its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


ENVIRONMENT = os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
MODULE = (sys.executable, "-m")
