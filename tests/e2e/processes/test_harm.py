"""Hostile requests against a real container, sent by the command that measures their effects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.e2e.serving import IMAGE, ROOT
from tests.harm.harm import Outcome

pytestmark = pytest.mark.skipif(IMAGE is not None, reason="the commands start the checkout's code")


def harm(out: Path, *arguments: str) -> bytes:
    command = [sys.executable, "-m", "tests.harm", *arguments, "--json", str(out / "found.json")]
    done = subprocess.run(
        [*command, "--log", str(out / "server.log")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (out / "found.json").read_bytes()


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(300)
def test_hostile_grammars_harm_nobody_else(tmp_path: Path) -> None:
    """Times are not asserted: the machine may be busy."""
    arguments = ["harm", "--rows", "rules,references,ambiguous", "--max-ping", "60000"]
    outcomes = msgspec.json.decode(harm(tmp_path, *arguments), type=list[Outcome])
    assert len(outcomes) == 5
    for outcome in outcomes:
        assert outcome.status in ("400", "424"), outcome
        assert (outcome.neighbours_failed, outcome.processes_lost) == (0, 0), outcome
