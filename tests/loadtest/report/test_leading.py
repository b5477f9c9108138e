"""If all servers keep up with an open loop, everything in the report leads with the latency."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.report import charts, tables, verdict
from loadtest.report.leading import LATENCY, THROUGHPUT, leading
from loadtest.report.page import write_markdown
from loadtest.report.rounds import in_rounds
from loadtest.study.results import Run
from tests.loadtest.report.known_runs import in_an_open_loop, results, rounds


def keeping_up() -> list[Run]:
    """Return runs in which `paged` has the lowest latency, and `none` the most requests/s."""
    runs = [*in_an_open_loop(0.9, 2.0, "none"), *in_an_open_loop(0.9, 1.0, "paged")]
    runs += in_an_open_loop(0.9, 1.5, "dynamic")
    for run in runs:
        run.measures.requests_per_s = 9.5 if run.name == "none" else 9.0
    return runs


def test_the_latency_leads_only_where_all_keep_up() -> None:
    assert leading(keeping_up()) is LATENCY
    assert leading([*keeping_up(), *in_an_open_loop(0.7, 1.0, "continuous")]) is THROUGHPUT
    assert leading(rounds("none", 1.0, 1.0, 1.0)) is THROUGHPUT, "a closed loop has no pace"


def test_a_variant_has_another_load_and_does_not_count() -> None:
    variant = rounds("dynamic", 1.0, variant="all answers 32 tokens")
    assert leading([*keeping_up(), *variant]) is LATENCY


def test_rows_ratios_and_the_mark_follow_the_latency() -> None:
    table = tables.summary(keeping_up())
    assert table.head == ["strategy", "aws, median latency", "× dynamic", "aws, requests/s"]
    assert table.rows == [
        ["paged", "1 s (1 s to 1 s)", "0.67×", "9"],
        ["dynamic", "1.50 s (1.50 s to 1.50 s)", "1.00×", "9"],
        ["none", "2 s (2 s to 2 s)", "1.33×", "9.50"],
    ]
    assert table.best == [(0, 1)]
    assert "paged answers in 1 s (median), dynamic in 1.50 s" in verdict.headline(keeping_up())


def test_tables_of_the_section_begin_with_the_latency() -> None:
    found = in_rounds(keeping_up())
    runs = [rounds.typical for rounds in found]
    table = tables.client_measures(runs, found[0].measure)
    assert [row[0] for row in table.rows] == ["paged", "dynamic", "none"]
    assert table.head[1] == "latency p50"
    usual = tables.client_measures(runs, THROUGHPUT)
    assert usual.head[1] == "requests/s"


def test_charts_begin_with_the_latency() -> None:
    rows = charts.bars(keeping_up())["vconcat"]
    first, second = (row["hconcat"][0] for row in rows)
    assert first["title"]["text"] == "aws: median latency, less is better"
    assert second["title"]["text"] == "aws: requests/s"
    assert first["encoding"]["y"]["scale"]["domain"] == ["paged", "dynamic", "none"]
    typical = [rounds.typical for rounds in in_rounds(keeping_up())]
    columns = charts.timelines(typical)["vconcat"][0]["hconcat"]
    assert [panel["title"] for panel in columns] == ["paged", "dynamic", "none"]


def test_the_markdown_report_begins_with_the_latency(tmp_path: Path) -> None:
    text = write_markdown(results(*keeping_up(), objective={"ttft": 2.0}), tmp_path).read_text()
    assert "| paged | **1 s (1 s to 1 s)** | 0.67× | 9 |\n| dynamic |" in text
    assert "| goodput, requests/s | paged | dynamic | none |" in text


def test_each_workload_has_its_own_leading_figure() -> None:
    """Requests/s lead in the first workload, so the rows keep the order of the strategies."""
    chat = rounds("paged", 1.0, 1.0, 1.0, workload="chat")
    chat += rounds("none", 2.0, 2.0, 2.0, workload="chat")
    both = tables.summary([*chat, *keeping_up()])
    assert both.head[1:] == [
        "chat, requests/s", "× none", "aws, median latency", "× dynamic", "aws, requests/s",
    ]  # fmt: skip
    assert [row[0] for row in both.rows] == ["none", "dynamic", "paged"]
    assert both.best == [(2, 1), (2, 3)]


@pytest.mark.parametrize(("latency_s", "is_proved"), [(1.5, True), (1.02, False)])
def test_the_explanation_compares_latencies(latency_s: float, is_proved: bool) -> None:
    runs = [*in_an_open_loop(0.9, 1.0, "none"), *in_an_open_loop(0.9, latency_s, "paged")]
    text = verdict.order(runs) or ""
    assert text.startswith(f"paged has {latency_s:.2f}× the median latency of none")
    assert ("which proves no difference" in text) != is_proved
