"""The report's files: the page and how a browser draws it, the Markdown and the pictures."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.report.page import write_markdown, write_report
from tests.loadtest.report.known_runs import compared, record, results, run, swept

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def test_a_sweep_is_described_without_one_of_its_rates(tmp_path: Path) -> None:
    sweep = swept()
    for entry in sweep.runs:
        entry.loop = f"open loop: Poisson arrivals, {entry.rate:g} requests/s"
        entry.records *= int(entry.rate or 1)
    text = write_report(sweep, tmp_path).read_text()
    assert "Open loop: Poisson arrivals. 8 to 32 requests per run" in text


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    text = write_report(compared(), tmp_path).read_text()
    page = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=|@import|url\(", page)
    for part in ("python -m loadtest compare", "option.batching", "seed", "processor"):
        assert part in page
    assert len(text) < 2_000_000


def test_server_text_is_escaped(tmp_path: Path) -> None:
    failed = [record(0), record(1, error="</script><b>503")]
    text = write_report(results(run("<i>", records=failed)), tmp_path).read_text()
    assert "<b>503" not in text
    assert "<i>" not in text


def test_a_report_in_markdown_has_warnings_winner_and_machine(tmp_path: Path) -> None:
    found = compared()
    found.notes.append("Look here.")
    found.objective = {"ttft": 2.0}
    text = write_markdown(found, tmp_path).read_text()
    assert text.startswith("**paged serves 2 requests/s on aws")
    assert text.index("- Look here.") < text.index("| strategy | aws, requests/s | × dynamic |")
    assert "| paged | **2 (1.88 to 2.13)** | 4.00× |" in text
    assert "| goodput, requests/s | none |" in text
    assert "2026-11-21, seed 0, processor one, GPU none" in text


def test_every_chart_has_a_picture(tmp_path: Path) -> None:
    compared().write(tmp_path)
    assert main(["report", str(tmp_path), "--out", str(tmp_path), "--pictures"]) == 0
    names = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert names == [
        "aws-batch-size-and-kv-cache", "aws-latency-distributions", "aws-the-first-24-requests",
        "overview",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize(("made", "num_charts"), [(compared, 4), (swept, 1)])
def test_a_browser_draws_every_chart(tmp_path: Path, made, num_charts: int, width: int) -> None:
    """On a narrow page, panels lie one below the other, so that no chart is wider than the page."""
    path = write_report(made(), tmp_path)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
        f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
        path.as_uri(),
    ]  # fmt: skip
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert page.count('data-state="drawn"') == num_charts
    assert 'data-state="failed"' not in page
    widths = [float(text) for text in re.findall(r'class="marks" width="([\d.]+)"', page)]
    assert len(widths) == num_charts
    assert max(widths) <= width
