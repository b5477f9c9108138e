"""The report: its text and charts agree with the figures, and a browser draws it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.record import Timings
from loadtest.report import charts, tables, verdict
from loadtest.report.gantt import Bar, bars_of, padding_share
from loadtest.report.page import write_report
from loadtest.report.style import colours, dashes, duration, in_order, number, percent
from loadtest.results import Results, Run, read_results
from loadtest.tuning import TUNED, Trial
from tests.loadtest.known_runs import record, results, run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def rounds(name: str, *seconds: float, **changes: Any) -> list[Run]:
    """Runs of one server, one per round."""
    return [run(name, length, round=at, **changes) for at, length in enumerate(seconds, 1)]


def compared() -> Results:
    """Three rounds in which each strategy is twice as fast as the one before it."""
    strategies = ("none", "dynamic", "continuous", "paged")
    runs = [
        entry
        for at, name in enumerate(strategies)
        for entry in rounds(name, *(length / 2**at for length in (15.0, 16.0, 17.0)))
    ]
    return results(*runs, *rounds("dynamic", 4.0, 4.0, 4.0, variant="all answers 32 tokens"))


def swept() -> Results:
    runs = [run(name, seconds=rate, rate=rate, users=None) for name in ("continuous", "paged")
            for rate in (1.0, 2.0, 4.0)]  # fmt: skip
    return results(*runs, slo={"ttft_p99": 1.5, "itl_p99": 0.2})


def test_headline_and_table_name_the_fastest() -> None:
    runs = compared().runs
    assert verdict.headline(runs) == (
        "paged serves 2 requests/s on aws: 2.00× continuous, 4.00× dynamic, 8.00× none"
    )
    table = tables.throughput(runs)
    assert list(table.head) == ["strategy", "aws, requests/s", "× dynamic"]
    assert table.rows[0] == ["none", "0.250 (0.235 to 0.267)", "0.50×"]
    assert table.rows[2] == ["dynamic, all answers 32 tokens", "1 (1 to 1)", "2.00×"]
    assert table.best == [(4, 1)]


def tuned() -> Results:
    """Dynamic batching as given, and with the best of two settings tried."""
    given = {"option.batching": "dynamic", "batch_size": "64", "max_batch_delay": "1000"}
    found = given | {"batch_size": "16", "max_batch_delay": "10"}
    trials = [
        Trial(workload="aws", settings=settings, requests_per_s=rate)
        for settings, rate in ((given, 1.5), (found, 2.5))
    ]
    runs = [
        *rounds("dynamic", 4.0, 4.0, 4.0, settings=given),
        *rounds("dynamic", 3.0, 3.0, 3.0, settings=given, variant="all answers 32 tokens"),
        *rounds(TUNED, 2.0, 2.0, 2.0, settings=found),
        *rounds("paged", 1.0, 1.0, 1.0),
    ]
    return results(*runs, trials=trials)


def test_ratios_refer_to_dynamic_batching_at_its_best() -> None:
    table = tables.throughput([*tuned().runs, *rounds("dynamic", 2.0, workload="chat")])
    assert [table.head[2], table.head[4]] == [f"× {TUNED}", "× dynamic"]
    by_label = {row[0]: row[2] for row in table.rows}
    assert (by_label["dynamic"], by_label[TUNED], by_label["paged"]) == ("0.50×", "1.00×", "2.00×")
    assert verdict.order(tuned().runs) == (
        "dynamic (tuned) has 2.00× the requests/s of dynamic. "
        "paged has 2.00× the requests/s of dynamic (tuned)."
    )


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
    assert panel["title"]["subtitle"] == [f"{TUNED}: batch size 16, delay 10 ms"]
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


def busy(runs: list[Run]) -> list[Run]:
    runs[0].measures.other_cpu = 0.9
    return runs


@pytest.mark.parametrize(
    ("continuous", "paged", "reason"),
    [
        (rounds("continuous", 2.0, 3.0, 4.0), rounds("paged", 1.0, 1.5, 2.5), "overlap"),
        (rounds("continuous", 4.0, 4.0), rounds("paged", 2.0, 2.0), "fewer than 3 rounds"),
        (busy(rounds("continuous", 4.0, 4.0, 4.0)), rounds("paged", 2.0, 2.0, 2.0), "0.9 cores"),
    ],
)
def test_without_proof_there_is_no_winner(
    continuous: list[Run], paged: list[Run], reason: str
) -> None:
    runs = [*continuous, *paged]
    assert re.match(f"Inconclusive on aws: .*{reason}", verdict.headline(runs))
    assert not tables.throughput(runs).best
    order = verdict.order(runs) or ""
    assert order.startswith("paged has 2.00× the requests/s of continuous, which proves no differ")


def test_the_order_of_strategies() -> None:
    assert verdict.order(compared().runs) == (
        "dynamic has 2.00× the requests/s of none. continuous has 2.00× the requests/s of dynamic. "
        "paged has 2.00× the requests/s of continuous."
    )
    assert verdict.order([run("paged")]) is None


def test_a_slower_strategy_is_explained_with_numbers() -> None:
    slow = [*rounds("continuous", 2.0, 2.0, 2.0), *rounds("paged", 4.0, 4.0, 4.0)]
    text = verdict.order(slow) or ""
    assert text.startswith("paged has 0.50× the requests/s of continuous: its steps")
    assert "run 2.50 sequences against 2.50 and take 100 ms against 100 ms" in text
    assert "fills 50 % of its allocated KV cache against 50 %" in text


def test_remarks_name_doubtful_figures() -> None:
    bad = run(
        records=[record(0), record(1, error="503: busy"), record(2, output_tokens=9)],
        is_whole=False,
    )
    bad.measures.client_cpu = 0.8
    bad.measures.other_cpu = 0.6
    bad.num_discarded = 2
    text = "\n".join(verdict.remarks([bad]))
    for part in (
        "interrupted",
        "1 requests failed, the first with: 503",
        "differ in length",
        "0.800 c",
        "used 0.60 c",
        "2 runs were discarded",
    ):
        assert part in text
    assert not list(verdict.remarks([run()]))


@pytest.mark.parametrize(("cores", "is_bottleneck"), [(0.81, True), (0.79, False)])
def test_a_busy_client_is_named_as_the_bottleneck(cores: float, is_bottleneck: bool) -> None:
    runs = rounds("vllm", 2.0, 2.0)
    runs[1].measures.client_cpu = cores
    (remark,) = verdict.remarks(runs)
    assert remark.startswith("vllm on aws: the client ")
    assert ("bottleneck: it used 81 % of a core" in remark) == is_bottleneck


def test_the_gantt_shows_stages_and_padding() -> None:
    """A batch of two, admitted together, of which one ends first; then the next batch."""
    short = Timings(arrived=100.0, admitted=101.0, first_token=102.0, finished=103.0)
    members = [record(0, 0.0, 4.0), record(1, 0.0, 4.0, timings=short), record(2, 1.0, 4.0)]
    bars = list(bars_of(run("dynamic", records=members), 2))
    assert bars == [
        Bar(0, "waiting", 0.0, 1.0), Bar(0, "prefill", 1.0, 2.0), Bar(0, "decoding", 2.0, 4.0),
        Bar(1, "waiting", 0.0, 1.0), Bar(1, "prefill", 1.0, 2.0), Bar(1, "decoding", 2.0, 3.0),
        Bar(1, "padding", 3.0, 4.0),
    ]  # fmt: skip
    assert padding_share(run("dynamic", records=members)) == pytest.approx(1 / 9)
    continuous = run("continuous", records=members)
    assert padding_share(continuous) is None
    assert all(bar.stage != "padding" for bar in bars_of(continuous, 2))


def test_without_server_timings_the_gantt_shows_the_clients_times() -> None:
    bars = list(bars_of(run(records=[record(0, 5.0, timings=None)]), 2))
    assert bars == [Bar(0, "waiting", 0.0, 1.0), Bar(0, "decoding", 1.0, 2.0)]


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


def test_the_verdict_of_a_sweep() -> None:
    table = tables.objectives(swept())
    assert table.rows[0][:2] == ["continuous", "2"]
    strict = results(*swept().runs, slo={"ttft_p99": 0.1})
    assert tables.objectives(strict).rows[0][1] == "less than 1"


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


def test_report_redraws_existing_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared().write(tmp_path / "a")
    results(run("paged", workload="chat")).write(tmp_path / "b")
    out = tmp_path / "out"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    text = (out / "report.html").read_text()
    assert "chat, requests/s" in text
    assert str(out / "report.html") in capsys.readouterr().out


def test_every_chart_has_a_picture(tmp_path: Path) -> None:
    compared().write(tmp_path)
    assert main(["report", str(tmp_path), "--out", str(tmp_path), "--pictures"]) == 0
    names = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert names == [
        "aws-batch-size-and-kv-cache", "aws-latency-distributions", "aws-the-first-24-requests",
        "overview",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to draw it with")
@pytest.mark.parametrize(("made", "num_charts"), [(compared, 4), (swept, 1)])
def test_a_browser_draws_every_chart(tmp_path: Path, made, num_charts: int) -> None:
    path = write_report(made(), tmp_path)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
        f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert page.count('data-state="drawn"') == num_charts
    assert 'data-state="failed"' not in page
    assert page.count('class="marks"') == num_charts
