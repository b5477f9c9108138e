"""The report's tables, colours and number formats."""

from __future__ import annotations

from pathlib import Path

from loadtest.report import charts, tables, verdict
from loadtest.report.page import write_markdown, write_report
from loadtest.report.style import UNKNOWN, colours, dashes, duration, in_order, number, percent
from loadtest.study.results import read_results
from loadtest.study.tuning import TUNED
from tests.loadtest.report.known_runs import record, results, rounds, run, sample, swept, tuned


def test_ratios_refer_to_dynamic_batching_at_its_best() -> None:
    table = tables.summary([*tuned().runs, *rounds("dynamic", 2.0, workload="chat")])
    assert [table.head[2], table.head[4]] == [f"× {TUNED}", "× dynamic"]
    by_label = {row[0]: row[2] for row in table.rows}
    assert (by_label["dynamic"], by_label[TUNED], by_label["paged"]) == ("0.50×", "1.00×", "2.00×")
    text = verdict.order(tuned().runs) or ""
    assert text.startswith("dynamic (tuned) has 2.00× the requests/s of dynamic: ")
    assert ". paged has 2.00× the requests/s of dynamic (tuned): " in text


def test_drafts_have_a_column_where_there_are_some() -> None:
    samples = [sample(at, draft_tokens=20 * at, accepted_tokens=9 * at) for at in range(5)]
    plain, drafting = run("paged"), run("drafting", samples=samples)
    table = tables.server_measures([plain, drafting])
    column = table.head.index("drafts accepted")
    assert [row[column] for row in table.rows] == [UNKNOWN, percent(0.45)]
    assert "steps with drafts" not in table.head, "vLLM does not say"
    assert "drafts accepted" not in tables.server_measures([plain]).head


def test_the_share_of_steps_with_drafts_has_a_column_even_if_it_is_0() -> None:
    samples = [sample(at, decode_steps=8 * at, drafted_steps=0) for at in range(5)]
    plain, declining = run("paged"), run("declining", samples=samples)
    table = tables.server_measures([plain, declining])
    column = table.head.index("steps with drafts")
    assert [row[column] for row in table.rows] == [UNKNOWN, percent(0.0)]


def test_the_report_shows_what_was_tried(tmp_path: Path) -> None:
    table = tables.trials(tuned().trials)
    assert table.rows == [
        ["batch size 64, delay 1000 ms (as given)", "1.50"],
        ["batch size 16, delay 10 ms", "2.50"],
    ]
    assert table.best == [(1, 0), (1, 1)]
    tuned().write(tmp_path)
    text = write_report(read_results(tmp_path), tmp_path).read_text()
    assert "batch size 64, delay 1000 ms (as given)" in text


def test_charts_name_the_setting_and_tell_lines_of_one_colour_apart() -> None:
    runs = [run for run in tuned().runs if not run.variant]
    panel = charts.bars(runs)["vconcat"][0]["hconcat"][0]
    assert panel["title"]["subtitle"] == [
        "4 users", "KV memory for 1,600 tokens", f"{TUNED}: batch size 16, delay 10 ms",
    ]  # fmt: skip
    curves = charts.latencies(runs)["hconcat"][0]["encoding"]
    assert curves["strokeDash"]["scale"] == {
        "domain": ["dynamic", TUNED, "paged"],
        "range": [(1, 0), (5, 3), (1, 0)],
    }


def test_goodput_is_a_row_for_every_workload(tmp_path: Path) -> None:
    """A quarter of the slow server's requests get their first token in time."""
    slow = [record(at, first_s=0.5 if at == 0 else 1.9) for at in range(4)]
    runs = [
        *rounds("dynamic", 2.0, records=slow), *rounds("paged", 1.0),
        *rounds("paged", 1.0, workload="chat"),
    ]  # fmt: skip
    found = results(*runs, objective={"ttft": 1.0, "itl": 0.2})
    table = tables.goodputs(found)
    assert list(table.head) == ["goodput, requests/s", "dynamic", "paged"]
    assert list(table.rows) == [["aws", "0.500", "4"], ["chat", "-", "4"]]
    text = write_report(found, tmp_path).read_text()
    assert "time to first token ≤ 1 s, mean inter-token latency ≤ 200 ms." in text


def test_the_verdict_of_a_sweep(tmp_path: Path) -> None:
    table = tables.objectives(swept())
    assert table.rows[0][:2] == ["continuous", "2"]
    strict = results(*swept().runs, slo={"ttft_p99": 0.1})
    table = tables.objectives(strict)
    assert (table.rows[0][1], table.best) == ("less than 1", [])
    assert "No server sustains a rate that was tried" in write_report(strict, tmp_path).read_text()


def test_goodput_is_a_row_for_every_rate_of_a_sweep(tmp_path: Path) -> None:
    """First tokens arrive half-way: after 0.5 s if an answer takes 1 s, after 1 s if it takes 2."""
    sweep = swept()
    sweep.objective = {"ttft": 0.9, "itl": 0.2}
    sweep.runs.append(run("vllm", rate=8.0, users=None, records=[record(0, 0.0, 1.0)]))
    table = tables.goodputs(sweep)
    assert list(table.head) == ["goodput, requests/s", "continuous", "paged", "vllm"]
    assert list(table.rows) == [
        ["at 1 sent", "4", "4", "-"], ["at 2 sent", "0", "0", "-"], ["at 4 sent", "0", "0", "-"],
        ["at 8 sent", "-", "-", "1"],
    ]  # fmt: skip
    best = tables.objectives(sweep)
    assert (best.head[2], best.rows[0][2]) == ("goodput", "0")
    assert "| at 1 sent | 4 | 4 | - |" in write_markdown(sweep, tmp_path).read_text()


def test_strategies_have_fixed_order_and_colours() -> None:
    labels = ["paged", TUNED, "vllm", "dynamic", "other", "dynamic, all answers 5 tokens", "none"]
    order = ["none", "dynamic", "dynamic, all answers 5 tokens", TUNED, "paged", "vllm", "other"]
    assert in_order(labels) == order
    found = colours(labels)
    assert found["paged"] == colours(["paged"])["paged"]
    assert found[TUNED] == found["dynamic"] == found["dynamic, all answers 5 tokens"]
    assert found["vllm"] == found["other"]
    assert len(set(found.values())) == 4
    shown = [label for label in labels if ", " not in label]
    lines = [(colours(shown)[label], *dashes(shown)[label]) for label in shown]
    assert len(set(lines)) == len(shown)


def test_numbers_are_formatted() -> None:
    values = (None, 0, 3, 4.1, 0.0312, 152.4, 12345.6)
    assert [*map(number, values)] == ["-", "0", "3", "4.10", "0.0312", "152", "12,346"]
    assert [*map(duration, (None, 2.0, 0.25, 0.0004))] == ["-", "2 s", "250 ms", "0.400 ms"]
    assert percent(0.057) == "5.7 %"
