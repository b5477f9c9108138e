"""Runs a command that ends with the process that waits for it.

`python -m core.process.tied_command PARENT FOLDER COMMAND...` runs a command in a folder. The
kernel kills it when the process PARENT ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from core.process.internal_arguments import internal_arguments
from core.process.names import python_command
from core.process.processes import die_with_parent


def run_to_end(command: Sequence[str], folder: Path = Path()) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and return its exit code and its errors.

    If a signal or another exception ends the wait, kills the command with all that it has started.
    If this process is killed, the kernel kills the command.
    """
    tied = [*python_command("core.process.tied_command"), str(os.getpid()), str(folder), *command]
    process = subprocess.Popen(tied, stderr=subprocess.PIPE, text=True, process_group=0)
    with process:
        try:
            _, errors = process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stderr=errors)


def main(parent: str, folder: str, *command: str) -> NoReturn:
    """Become the command."""
    die_with_parent(int(parent))
    os.chdir(folder)
    os.execv(command[0], command)


if __name__ == "__main__":
    description = "Runs a command that ends with another process. `longshore serve` starts it."
    main(
        *internal_arguments(
            "core.process.tied_command", description, "PARENT:int FOLDER COMMAND..."
        )
    )
