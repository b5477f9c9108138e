"""Runs `pip install` with a line of progress instead of hundreds, for make.

    python packaging/wheel/install.py --constraint constraints.txt --editable .

On a terminal the line says for how long pip has run and what it does. At the end there is one line
with what was installed. Errors and warnings of pip appear whole.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

STAGES = ("Collecting", "Downloading", "Using cached", "Building", "Installing", "Preparing")
"""The first words of those output lines of pip that say what it is doing."""
REFRESH_S = 0.5
MIB = 2**20


def install(arguments: Sequence[str], site: Path, out: TextIO) -> int:
    """Run pip with these arguments and return its exit code.

    site: the directory whose growth is the size of what was installed.
    """
    started, before = time.monotonic(), _size(site)
    # pip inherits our standard error, so its warnings and errors appear as they come.
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=_collect, args=(pip.stdout, lines))
        reader.start()
        while reader.is_alive():
            reader.join(REFRESH_S)
            if out.isatty():
                _overwrite(out, f"{time.monotonic() - started:.0f} s: {stage(lines)}")
    if out.isatty():
        _overwrite(out, "")
    if pip.returncode == 0:
        mib = (_size(site) - before) / MIB
        print(f"{summary(lines)}, {mib:.0f} MiB, in {time.monotonic() - started:.0f} s", file=out)
    else:
        print("".join(lines), file=out)
    return pip.returncode


def stage(lines: Sequence[str]) -> str:
    """Return the newest line that says what pip is doing. Before there is one: "starting pip"."""
    said = (line.strip() for line in reversed(lines) if line.lstrip().startswith(STAGES))
    return next(said, "starting pip").partition(": ")[0]  # a list of packages may follow


def summary(lines: Iterable[str]) -> str:
    """Return how many packages pip says it has installed."""
    done = next((line for line in lines if line.startswith("Successfully installed ")), "")
    count = max(0, len(done.split()) - 2)
    return f"installed {count} {'package' if count == 1 else 'packages'}"


def _collect(source: Iterable[str], lines: list[str]) -> None:
    for line in source:
        lines.append(line)  # one by one, since `install` reads the list meanwhile


def _overwrite(out: TextIO, text: str) -> None:
    """Replace the terminal's current line."""
    width = shutil.get_terminal_size().columns - 1
    print(f"\r\x1b[K{text[:width]}", end="", file=out, flush=True)


def _size(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:], Path(sysconfig.get_paths()["purelib"]), sys.stdout))
