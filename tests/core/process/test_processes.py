"""Processes that end with their parent, or at a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core.process.processes import reap_orphans
from core.process.tied_command import run_to_end
from tests.container.processes import HANG_S, ROOT, children, is_gone, running, wait_until

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


def test_only_orphans_are_reaped() -> None:
    """Their parents have ended, and process 1 has inherited them."""
    orphan, child = (subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2))
    os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
    reap_orphans([child.pid])
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan.pid, 0)
    orphan.wait()
    assert child.wait() == 0


def test_a_command_ends_with_the_process_that_waits_for_it() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    program = f"from core.process.tied_command import run_to_end; run_to_end({sleep!r})"
    with running(["-c", program]) as waiting:

        def sleeping() -> list[int]:
            lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in children(waiting.pid)}
            return [pid for pid, line in lines.items() if b"-c" in line.read_bytes().split(b"\0")]

        wait_until(sleeping)
        (pid,) = sleeping()
        waiting.kill()
        wait_until(lambda: is_gone(pid))


def test_a_command_that_ends_has_a_code_and_errors(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(os.getcwd())"
    done = run_to_end([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path}\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_server_starts(signum: signal.Signals) -> None:
    program = (
        "import sys, time; from core.process.processes import until_stopped; "
        "sys.exit(until_stopped(lambda: (print('starts', flush=True), time.sleep(1000))))"
    )
    with running(["-c", program]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        process.send_signal(signum)
        output, errors = process.communicate(timeout=HANG_S)
    assert (process.returncode, output, errors) == (0, "stopped while starting\n", "")


def test_a_server_that_cannot_clean_up_ends_too() -> None:
    """A library may wait for its threads when the exception passes."""
    program = (
        "import sys, threading, time; from core.process.processes import until_stopped\n"
        "def run():\n"
        "    try:\n"
        "        print('starts', flush=True); time.sleep(1000)\n"
        "    finally:\n"
        "        time.sleep(1000)\n"
        "sys.exit(until_stopped(run))"
    )
    with running(["-c", program]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        process.terminate()
        assert process.wait(HANG_S) == 0


def test_the_exit_code_of_a_server_that_ends_by_itself() -> None:
    program = (
        "import sys; from core.process.processes import until_stopped; "
        "sys.exit(until_stopped(lambda: 3))"
    )
    with running(["-c", program]) as process:
        assert process.wait(HANG_S) == 3
