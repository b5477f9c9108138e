"""Makes the pictures and measured figures of README and docs, with captions.

    make pictures OUT=build/compare          # after `make compare`
    .browser/bin/python -m tests.browser.pictures --only ui.png,strategies.png

`compare.png` and `compare-requests.png` are drawn from the results of `make compare`; nothing is
measured here. `ui.png`, `strategies.png` and `recording.png` are screenshots of the demo model.
`vllm` stands for README's comparison table, made from files of benchmarks/results. The texts
between the markers in README and docs are replaced (captions.py).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from PIL import Image
from playwright.sync_api import TimeoutError

from tests.browser.captions import fill
from tests.browser.chromium import NoBrowserError, chromium
from tests.browser.demo_server import PYTHON, ROOT, demo_server
from tests.browser.live_page import open_page, set_slider, wait_for_answers
from tests.browser.peer_table import peer_table
from tests.browser.replay_page import (
    LONGEST_ANSWER_MS,
    explain_longest_wait,
    open_recording,
    replay_page,
)

DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
NUM_COLOURS = 256
DESCRIBE = (
    "import json; from loadtest.machine import describe_machine; "
    "print(json.dumps(describe_machine()))"
)
UI_FLAGS = ("--max-model-len", "512", "--num-kv-blocks", "72")
STRATEGIES_FLAGS = ("--strategies", "all", "--max-model-len", "512", "--num-kv-blocks", "96")
NEARLY_FULL = re.compile(r"^[6-9]\d")
"""What the page says of the KV memory, in percent, when most of it is in use."""
MAX_BURSTS = 20
FULL_MS = 5_000
"""How long to wait, in milliseconds, for the page to show NEARLY_FULL after a burst is sent."""
WHILE_THEY_RUN_MS = 1_000
"""After so many milliseconds, three bursts hold most of the KV memory."""
CHARTS = {"compare.png": "overview.png", "compare-requests.png": "aws-the-first-24-requests.png"}
"""The pictures that the load test draws, by the names that they have in docs."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of the pictures, and the machine that makes them."""

    compare: Path
    machine: Mapping[str, str]
    """The result of `describe_machine`. It is read before any picture is written, since a changed
    picture would mark the commit as dirty."""
    created: str
    load: float
    """The machine's load average over the minute before these inputs were read."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compare", type=Path, default=Path("build/compare"), metavar="DIR",
        help="results of `make compare` (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only", type=_names, default=list(MAKERS), metavar="NAME,...",
        help=f"out of {', '.join(MAKERS)} (default: all)",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        inputs = Inputs(
            options.compare.resolve(), _machine(), datetime.now(UTC).isoformat(), os.getloadavg()[0]
        )
        fill(PAGES, {name: MAKERS[name](name, inputs) for name in options.only})
    except (NoBrowserError, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in MAKERS]:
        raise argparse.ArgumentTypeError(
            f"no picture {', '.join(unknown)}; choose from {', '.join(MAKERS)}"
        )
    return names


def _chart(name: str, inputs: Inputs) -> str:
    """Draw a chart of the load test, and return its caption."""
    results = inputs.compare / "results.json"
    if not results.is_file():
        raise ValueError(f"no {results}; run `make compare` first, or name its folder by --compare")
    with tempfile.TemporaryDirectory() as folder:
        _run("-m", "loadtest", "report", str(inputs.compare), "--pictures", "--out", folder)
        _save(Path(folder, CHARTS[name]).read_bytes(), name)
    found = json.loads(results.read_text())
    return _caption("`make compare`", found["machine"], found["created"])


def _ui(name: str, inputs: Inputs) -> str:
    """Photograph the live page while eight requests run, after a first burst of eight has ended."""
    with chromium() as browser, demo_server(*UI_FLAGS) as url:
        page = browser.new_page(viewport={"width": 1400, "height": 990})
        open_page(page, url)
        set_slider(page, "max-tokens", 256)
        page.click("#burst")
        wait_for_answers(page, "burst")
        # On a fast machine, memory may be nearly full so briefly that we miss it; then try again.
        for _ in range(MAX_BURSTS):
            page.click("#burst")
            with suppress(TimeoutError):
                page.locator("#kv-use", has_text=NEARLY_FULL).wait_for(timeout=FULL_MS)
                _save(page.screenshot(), name)
                return _screenshot_caption(UI_FLAGS, inputs)
            wait_for_answers(page, "burst")
    raise RuntimeError(f"{name}: the KV memory was never seen nearly full; run it again")


def _strategies(name: str, inputs: Inputs) -> str:
    """Photograph the page of all strategies after eight requests to each."""
    with chromium() as browser, demo_server(*STRATEGIES_FLAGS) as url:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        open_page(page, url)
        page.click("#send")
        wait_for_answers(page, "send")
        _save(page.screenshot(full_page=True), name)
    return _screenshot_caption(STRATEGIES_FLAGS, inputs)


def _recording(name: str, inputs: Inputs) -> str:
    """Photograph the page of a recording: why a request waited that came when memory was full."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        with demo_server(*UI_FLAGS, "--record", folder) as url:
            pages = [browser.new_page() for _ in range(4)]
            for page in pages:
                open_page(page, url)
                set_slider(page, "max-tokens", 256)
            for page in pages[:-1]:
                page.click("#burst")
            pages[-1].wait_for_timeout(WHILE_THEY_RUN_MS)
            pages[-1].click("#burst")
            for page in pages:
                wait_for_answers(page, "burst")
        with replay_page(Path(folder)) as url:
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            open_recording(page, url)
            explain_longest_wait(page)
            page.locator(".chip", has_text="Fork without").first.click()
            page.wait_for_selector("#futures .panel", timeout=LONGEST_ANSWER_MS)
            _save(page.screenshot(full_page=True), name)
    return _screenshot_caption(UI_FLAGS, inputs)


def _vllm(name: str, inputs: Inputs) -> str:
    return peer_table(ROOT / "benchmarks" / "results")


MAKERS: Mapping[str, Callable[[str, Inputs], str]] = {
    **dict.fromkeys(CHARTS, _chart),
    "ui.png": _ui,
    "strategies.png": _strategies,
    "recording.png": _recording,
    "vllm": _vllm,
}
"""By name: a function that makes the picture, if any, and returns the text for its markers."""


def _caption(command: str, machine: Mapping[str, str], created: str, load: str = "") -> str:
    processor = machine["processor"].replace("(R)", "").removesuffix(" for this process")
    gpu = "no GPU" if machine["GPU"] == "none" else machine["GPU"]
    return f"*{command} on {processor}, {gpu}; {created[:10]}, commit {machine['commit']}{load}*"


def _screenshot_caption(flags: Sequence[str], inputs: Inputs) -> str:
    """Return a caption with the load average, since other load slows what a screenshot shows."""
    command = f"`longshore serve models/demo {' '.join(flags)}`"
    load = f"; the machine's load average in the minute before was {inputs.load:.1f}"
    return _caption(command, inputs.machine, inputs.created, load)


def _machine() -> dict[str, str]:
    return json.loads(_run("-c", DESCRIBE))


def _run(*arguments: str) -> str:
    """Return what our own Python prints. Raises RuntimeError with its errors if it fails."""
    done = subprocess.run(
        [PYTHON, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


def _save(png: bytes, name: str) -> None:
    """Write a picture with a palette, which makes it several times smaller."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    small = picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    small.save(DOCS / name, optimize=True)
    print(f"wrote {DOCS / name}", flush=True)


if __name__ == "__main__":
    main()
