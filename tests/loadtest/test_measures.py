"""The figures, against values computed by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from loadtest.servers.watch import parse
from loadtest.study.measures import Spread, measures_of, quantile, quantiles
from loadtest.study.rate_search import MAX_RATES, RateSearch
from loadtest.study.results import read_results
from loadtest.study.slo import goodput, holds, parse_slo, per_request, sustained, value_of
from tests.loadtest.report.known_runs import record, results, run, sample


def test_rates_are_over_the_wall_clock() -> None:
    """Four requests run from 1 to 3 s and four from 3 to 5 s: eight requests in four seconds."""
    records = [record(at, start) for at, start in enumerate([1.0] * 4 + [3.0] * 4)]
    found = measures_of(records, [0.1, 0.3], [], clients=4)
    assert found.seconds == 4.0
    assert found.requests_per_s == 2.0
    assert found.tokens_per_s == 20.0
    assert found.awscurl_tps == 8 / (8 * 2.0) * 4
    assert found.first_token == Spread(mean=1.0, p50=1.0, p90=1.0, p99=1.0, max=1.0)
    assert found.queue is not None
    assert found.queue.mean == 0.5
    assert found.gap is not None
    assert (found.gap.mean, found.gap.max) == (0.2, 0.3)


def test_failed_requests_count_only_as_errors() -> None:
    records = [record(0), record(1, error="503", output_tokens=None, first_s=None)]
    found = measures_of(records, [], [], clients=2)
    assert (found.num_good, found.num_errors) == (1, 1)
    assert (found.requests_per_s, found.tokens_per_s) == (0.5, 5.0)
    none = measures_of([record(0, error="503")], [], [], clients=2)
    assert (none.requests_per_s, none.tokens_per_s, none.latency) == (0.0, None, None)
    assert measures_of([], [], [], clients=2).requests_per_s == 0


def test_token_counts_are_not_guessed() -> None:
    found = measures_of([record(0), record(1, output_tokens=None)], [], [], clients=2)
    assert (found.tokens_per_s, found.output_tokens, found.num_short) == (None, None, 0)


def test_answers_of_another_length_are_counted() -> None:
    assert measures_of([record(0), record(1, output_tokens=9)], [], [], clients=2).num_short == 1


def test_an_open_loop_reports_lateness_and_no_clients() -> None:
    records = [record(0, 1.0, due_s=0.9), record(1, 2.0, due_s=2.0)]
    found = measures_of(records, [], [], clients=None)
    assert found.late_s == pytest.approx(0.1)
    assert found.awscurl_tps is None


def test_figures_from_the_servers_counters() -> None:
    """Counters cover the time up to the last sample, which is taken after the end of the run."""
    samples = [sample(0.0, kv_used=0.0), sample(1.0), sample(2.0), sample(4.0, kv_used=0.9)]
    inside = measures_of([record(0)], [], samples, clients=1).inside
    assert inside.batch == 2.5
    assert inside.step_s == 2.0 / 40
    assert inside.kv_used == 0.5, "sampled while the server was busy, not after the end"
    assert inside.kv_filled == pytest.approx(400 / 1600 / 0.5)
    assert (inside.preemptions, inside.prefix_hits) == (4.0, 0.25)
    assert (inside.drafts_accepted, inside.steps_drafted) == (None, None)
    counters = {"draft_tokens": 20, "accepted_tokens": 9, "decode_steps": 10, "drafted_steps": 4}
    samples = [sample(at, **{key: n * at for key, n in counters.items()}) for at in (1.0, 3.0)]
    drafting = measures_of([record(0)], [], samples, clients=1)
    assert drafting.inside.drafts_accepted == pytest.approx(0.45)
    assert drafting.inside.steps_drafted == pytest.approx(0.4)
    measures = measures_of([record(0)], [], samples, clients=1)
    assert measures.other_cpu == 0.1, (
        "of 1.7 CPU seconds, 1.5 are the server's and 0.1 the client's"
    )
    assert measures_of([record(0)], [], [], clients=1).inside.batch is None


def test_quantiles() -> None:
    assert [quantile([1, 2, 3, 4], share) for share in (0, 0.25, 0.5, 0.51, 1)] == [1, 1, 2, 3, 4]
    assert quantiles([3.0, 1.0, 2.0], count=2) == [1.0, 2.0, 3.0]
    assert quantiles([]) == []


def test_metrics_of_vllm_and_of_our_server() -> None:
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model_name="m"} 3.0\n'
        "# TYPE vllm:num_preemptions_total counter\n"
        'vllm:num_preemptions_total{mode="a"} 1.0\nvllm:num_preemptions_total{mode="b"} 2.0\n'
        "# TYPE vllm:request_queue_time_seconds histogram\n"
        'vllm:request_queue_time_seconds_bucket{le="+Inf"} 4.0\n'
        "vllm:request_queue_time_seconds_sum 2.5\nvllm:request_queue_time_seconds_count 4.0\n"
        "# TYPE other gauge\nother 1.0\n"
    )
    expected = {"running": 3.0, "preemptions": 3.0, "queue_sum_s": 2.5, "queue_count": 4.0}
    assert parse(text) == expected


def test_metrics_of_several_copies() -> None:
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
        "# TYPE longshore:kv_block_tokens gauge\n"
        'longshore:kv_block_tokens{engine="0"} 16\nlongshore:kv_block_tokens{engine="1"} 16\n'
    )
    assert parse(text) == {"running": 4.0, "kv_used": 0.375, "kv_block_tokens": 16.0}


def test_steps_with_drafts_are_those_of_two_decisions() -> None:
    name = "longshore:spec_decode_steps_total"
    counts = {"drafted": 5, "tried": 1, "cost": 3, "not_found": 11}
    lines = [f'{name}{{engine="0",decision="{key}"}} {count}.0' for key, count in counts.items()]
    text = "\n".join([f"# TYPE {name.removesuffix('_total')} counter", *lines])
    assert parse(text) == {"decode_steps": 20.0, "drafted_steps": 6.0}


def test_results_round_trip_through_files(tmp_path: Path) -> None:
    written = results(run("none"), run("paged", round=2))
    written.write(tmp_path)
    assert read_results(tmp_path) == read_results(tmp_path / "results.json") == written
    with (tmp_path / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert [row["round"] for row in rows] == [*8 * ["1"], *8 * ["2"]]
    assert (rows[0]["run"], rows[0]["output_tokens"], rows[0]["admitted"]) == (
        "none",
        "10",
        "100.5",
    )


def test_objectives_are_evaluated() -> None:
    slo = parse_slo("ttft_p99=2s, itl_max=99.5ms")
    assert slo == {"ttft_p99": 2.0, "itl_max": 0.0995}
    measures = run().measures
    assert value_of(measures, "ttft_p99") == 1.0
    assert not holds(measures, slo)
    assert holds(measures, {"ttft_p99": 2.0, "itl_max": 0.1})
    assert not holds(measures_of([], [], [], clients=1), {})
    failed = measures_of([record(0), record(1, error="503")], [], [], clients=1)
    assert not holds(failed, {}), "an error is never within an objective"
    unknown = measures_of([record(0, timings=None)], [], [], clients=1)
    assert not holds(unknown, {"queue_p50": 100.0}), "an objective without measurements is not met"


def test_a_growing_backlog_is_not_sustained() -> None:
    """Requests arrive once per second. They are answered at that rate, or at half of it."""

    def swept(apart_s: float):
        records = [
            record(at, float(at), 1 + at * (apart_s - 1), due_s=float(at)) for at in range(9)
        ]
        return measures_of(records, [0.1], [], clients=None)

    even, behind = swept(1.0), swept(2.0)
    assert (even.pace, behind.pace) == (1.0, 0.5)
    assert holds(even, {"itl_max": 0.1})
    assert not holds(behind, {"itl_max": 0.1})


@pytest.mark.parametrize("text", ["ttft=2s", "ttft_p99=2", "ttft_p98=2s", "", "ttft_p99=2s;"])
def test_invalid_objectives(text: str) -> None:
    with pytest.raises(ValueError, match="invalid bound"):
        parse_slo(text)


def tried(limit: float, first: float = 1.0, num_refinements: int = 3) -> tuple[list[float], float]:
    """Return the rates that a search tries if rates up to `limit` are sustained, and the best."""
    search, rates = RateSearch(first, num_refinements), []
    while (rate := search.next()) is not None:
        rates.append(rate)
        search.report(rate, held=rate <= limit)
    return rates, search.highest or 0.0


def test_the_search_doubles_and_then_halves() -> None:
    assert tried(5.4) == ([1, 2, 4, 8, 6, 5, 5.5], 5)
    assert tried(0.3) == ([1, 0.5, 0.25, 0.375], 0.25)
    assert len(tried(1e9)[0]) == MAX_RATES


def test_the_best_rate_is_below_the_first_that_fails() -> None:
    runs = [run(rate=2.0), run(rate=1.0), run(rate=8.0), run(rate=4.0, seconds=9.0)]
    assert sustained(runs, {"e2e_p99": 3.0}) == 2.0
    assert sustained(runs, {"e2e_p99": 1.0}) is None


def test_goodput_counts_requests_whose_own_figures_meet_every_bound() -> None:
    """Of five requests in 4 s, one fails, one has a late first token and one has slow tokens."""
    records = [
        record(0, length=2.0, gap_s=0.2),
        record(1, length=2.0, gap_s=None, output_tokens=1),
        record(2, length=4.0, gap_s=0.1),
        record(3, length=2.0, gap_s=0.3),
        record(4, length=2.0, gap_s=0.1, error="503"),
    ]
    measured = run(records=records)
    bounds = per_request(parse_slo("ttft_p50=500ms,ttft_p99=1s,itl_p99=200ms"))
    assert bounds == {"ttft": 1.0, "itl": 0.2}
    assert goodput(measured, bounds) == 2 / 4.0
    assert goodput(measured, {"e2e": 4.0}) == 4 / 4.0
    assert goodput(measured, {"queue": 0.5}) == 3 / 4.0


def test_the_goodput_of_unknown_figures_is_unknown() -> None:
    whole = run(records=[record(0), record(1, first_s=None, timings=None)])
    assert goodput(whole, {"itl": 9.0}) is None
    assert goodput(whole, {"queue": 9.0}) is None
    assert goodput(whole, {"e2e": 9.0}) == 1.0
