"""Clients for Node: OpenAI's, Vercel's AI SDK and Anthropic's. Their cases are in `node`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import NODE_CLIENTS

NODE = Path(sys.executable).with_name("node")
TIMEOUT_S = 120

Run = Callable[[str, str], None]


def cases(file: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test once for each case in a file, with the case's name."""
    text = (NODE_CLIENTS / file).read_text()
    names = re.findall(r'^test\("([^"]+)"', text, re.MULTILINE)
    assert len(names) == len(re.findall(r"\btest\(", text)), f"{file}: the pattern misses a case"
    return pytest.mark.parametrize("case", names)


@pytest.fixture
def run(url: str, encoder_url: str) -> Run:
    """Run one case of a file in Node's own test runner."""

    def run(file: str, case: str) -> None:
        servers = {"LONGSHORE_URL": url, "LONGSHORE_ENCODER_URL": encoder_url}
        pattern = f"--test-name-pattern=^{re.escape(case)}$"
        done = subprocess.run(
            [NODE, "--test-reporter=tap", pattern, NODE_CLIENTS / file],
            env={**os.environ, **servers}, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        # Node also succeeds if it finds no case of this name.
        assert "\n# pass 1\n" in done.stdout, done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@cases("openai.mjs")
def test_openai(run: Run, case: str) -> None:
    run("openai.mjs", case)


@cases("ai.mjs")
def test_ai(run: Run, case: str) -> None:
    run("ai.mjs", case)


@cases("anthropic.mjs")
def test_anthropic(run: Run, case: str) -> None:
    run("anthropic.mjs", case)
