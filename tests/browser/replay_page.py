"""The page of a recording: serves it for a browser, and what a user does there first."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page

from tests.browser.demo_server import PYTHON, ROOT

LONGEST_ANSWER_MS = 60_000
LONGEST_WAIT = """async () => {
  const { rows } = await (await fetch("ui/replay/recording")).json();
  const wait = ({ arrived, admitted }) => (admitted ?? arrived) - arrived;
  return rows.reduce((best, row) => (wait(row) > wait(best) ? row : best)).id;
}"""
"""Returns the request that was in the queue longest before it ran."""


@contextmanager
def replay_page(folder: Path) -> Iterator[str]:
    """Serve the page of the recording in a folder, and yield its address."""
    command = [str(PYTHON), "-m", "longshore", "replay", str(folder), "--page", "0"]
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


def make_recording(folder: Path) -> None:
    """Write a recording of a small engine, in which requests wait for blocks."""
    command = [str(PYTHON), "-m", "tests.benchmarks.replay.recordings", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)


def open_recording(page: Page, url: str) -> None:
    """Open the page and wait until it shows a moment."""
    page.goto(url)
    page.wait_for_selector("#status.live", timeout=LONGEST_ANSWER_MS)
    page.wait_for_selector("#batch[aria-label*='around this moment']")


def explain_longest_wait(page: Page) -> None:
    """Let the page say why the request waited that waited longest."""
    page.fill("#request", str(page.evaluate(LONGEST_WAIT)))
    page.click("#choose button")
    page.wait_for_selector("#why .receipt", timeout=LONGEST_ANSWER_MS)
