"""aiperf, which measures how fast a server answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from conftest import SUITES

NUM_REQUESTS = 6


def test_no_request_fails(url: str, model_dir: Path, tmp_path: Path) -> None:
    subprocess.run(
        [SUITES / "bin/aiperf", "profile", "--model", "demo", "--url", url, "--streaming",
         "--endpoint-type", "chat", "--tokenizer", model_dir, "--request-count", str(NUM_REQUESTS),
         "--concurrency", "2", "--isl", "32", "--osl", "8", "--ui", "none",
         "--output-artifact-dir", tmp_path],
        check=True,
    )  # fmt: skip
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    measured = json.loads(report.read_text())
    assert measured["request_count"]["avg"] == NUM_REQUESTS
    assert not measured["error_summary"]
