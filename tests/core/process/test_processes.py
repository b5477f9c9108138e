"""Processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.container.processes import ROOT

NOBODY = str(2**22 + 1)
"""A number above all process ids."""
CHILD = (
    "import sys; from core.process.processes import die_with_parent; "
    "die_with_parent(int(sys.argv[1]))"
)
WORKER = """
import sys
from types import SimpleNamespace
from container.front_end.worker import DrainingWorker
DrainingWorker.init_process(SimpleNamespace(ppid=int(sys.argv[1]), handle_exit=print))
"""


def exit_code(*arguments: str) -> int:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL
    ).returncode


def test_a_child_lives_only_if_its_parent_does() -> None:
    assert exit_code("-c", CHILD, str(os.getpid())) == 0
    assert exit_code("-c", CHILD, NOBODY) == -signal.SIGKILL


@pytest.mark.parametrize(
    "command",
    [
        ("-c", WORKER, NOBODY),
        ("-m", "container.batch.serve_batch", NOBODY, "", "", "socket", "1", "[]"),
        ("-m", "container.front_end.start", NOBODY, "launch"),
        ("-m", "container.isolation.process", NOBODY),
        ("-m", "container.multi_model.serve_model", NOBODY, "url", "name", "socket", "0", "{}"),
        ("-m", "engine", NOBODY, "launch", "0"),
        ("-m", "engine.follow", "localhost:1", "1", "model", "--parent", NOBODY),
        ("-m", "engine.vision.reader", NOBODY),
        ("-m", "deploy.fleet.node_process", "follow", NOBODY, "file", "1", "2", "localhost:1", "1"),
    ],
    ids=lambda command: command[1] if command[0] == "-m" else "worker",
)
def test_a_process_ends_at_its_start_if_its_parent_has_ended(command: tuple[str, ...]) -> None:
    assert exit_code(*command) == -signal.SIGKILL
