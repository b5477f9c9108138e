"""The chart of the first requests, and where a long panel is cut."""

from __future__ import annotations

import pytest

from loadtest.load.record import Timings
from loadtest.report.charts import Spec
from loadtest.report.gantt import Bar, bars_of, gantt, padding_share
from loadtest.study.results import Run
from tests.loadtest.report.known_runs import record, run


def test_the_gantt_shows_stages_and_padding() -> None:
    """Two requests are admitted as one batch, and one of them ends first. The third comes later."""
    short = Timings(arrived=100.0, admitted=101.0, first_token=102.0, finished=103.0)
    members = [record(0, 0.0, 4.0), record(1, 0.0, 4.0, timings=short), record(2, 1.0, 4.0)]
    bars = list(bars_of(run("dynamic", records=members), 2))
    assert bars == [
        Bar(0, "waiting", 0.0, 1.0), Bar(0, "prefill", 1.0, 2.0), Bar(0, "decoding", 2.0, 4.0),
        Bar(1, "waiting", 0.0, 1.0), Bar(1, "prefill", 1.0, 2.0), Bar(1, "decoding", 2.0, 3.0),
        Bar(1, "padding", 3.0, 4.0),
    ]  # fmt: skip
    # Each of the three holds a slot for 3 s. One second of the 9 s is padding.
    assert padding_share(run("dynamic", records=members)) == pytest.approx(1 / 9)
    continuous = run("continuous", records=members)
    assert padding_share(continuous) is None
    assert all(bar.stage != "padding" for bar in bars_of(continuous, 2))


def waiting(name: str, *finished: float) -> Run:
    """Requests that arrive at 0 and run one after the other, each for half a second."""
    records = [
        record(at, timings=Timings(100.0, 100 + end - 0.5, 100 + end - 0.4, 100 + end))
        for at, end in enumerate(finished)
    ]
    return run(name, records=records)


def domain(panel: Spec) -> list[float]:
    return panel["encoding"]["x"]["scale"]["domain"]


def test_a_long_panel_is_cut_and_says_where_it_ends() -> None:
    quick, slow = waiting("paged", 0.5, 1.2), waiting("none", 0.5, 5.0)
    spec = gantt([slow, quick])
    assert spec is not None
    cut, whole = spec["vconcat"]
    assert (cut["title"]["text"], whole["title"]["text"]) == ("none", "paged")
    assert domain(cut) == domain(whole) == [0, pytest.approx(1.2)], "the quick panel's scale"
    assert cut["mark"]["clip"]
    assert cut["title"]["subtitle"][-1] == "the last of them ends after 5 s"
    assert "the last of them" not in str(whole["title"]["subtitle"])
    bars = cut["data"]["values"]
    last = next(bar for bar in bars if bar["request"] == 1 and bar["stage"] == "decoding")
    assert (last["from"], last["to"]) == (pytest.approx(4.6), pytest.approx(5.0))


def test_panels_of_similar_length_have_one_axis() -> None:
    spec = gantt([waiting("continuous", 1.2), waiting("paged", 1.0)])
    assert spec is not None
    assert [domain(panel) for panel in spec["vconcat"]] == [[0, pytest.approx(1.2)]] * 2


def test_without_server_timings_the_gantt_shows_the_clients_times() -> None:
    bars = list(bars_of(run(records=[record(0, 5.0, timings=None)]), 2))
    assert bars == [Bar(0, "waiting", 0.0, 1.0), Bar(0, "decoding", 1.0, 2.0)]
