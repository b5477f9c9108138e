"""Processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.container.processes import ROOT

CHILD = "import sys; from core.processes import die_with_parent; die_with_parent(int(sys.argv[1]))"


def test_a_child_whose_parent_has_ended_already_ends() -> None:
    def exit_code(parent: int) -> int:
        return subprocess.run([sys.executable, "-c", CHILD, str(parent)], cwd=ROOT).returncode

    assert exit_code(os.getpid()) == 0
    assert exit_code(2**22 + 1) == -signal.SIGKILL  # above all process ids
