"""Serves the page of a recording for a browser."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.browser.demo_server import PYTHON, ROOT

LONGEST_ANSWER_MS = 60_000


@contextmanager
def replay_page() -> Iterator[str]:
    """Serve a recording that tests make, and yield the address of its page."""
    with tempfile.TemporaryDirectory() as folder:
        made = [str(PYTHON), "-m", "tests.benchmarks.replay.recordings", folder]
        subprocess.run(made, cwd=ROOT, check=True)
        command = [str(PYTHON), "-m", "longshore", "replay", folder, "--page", "0"]
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            found = (re.match(r"http://\S+", line) for line in lines)
            yield next(match[0] for match in found if match)
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()
