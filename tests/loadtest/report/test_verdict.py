"""The sentences of the report agree with the figures."""

from __future__ import annotations

import re

import pytest

from loadtest.load.record import Timings
from loadtest.report import tables, verdict
from loadtest.report.causes import explanation
from loadtest.report.regime import kv_tokens, regime
from loadtest.study.measures import Spread
from loadtest.study.results import Run
from tests.loadtest.report.known_runs import compared, in_an_open_loop, record, rounds, run, sample


def test_headline_and_table_name_the_fastest() -> None:
    runs = compared().runs
    assert verdict.headline(runs) == (
        "paged serves 2 requests/s on aws: 2.00× continuous, 4.00× dynamic, 8.00× none"
    )
    table = tables.summary(runs)
    assert list(table.head) == ["strategy", "aws, requests/s", "× dynamic"]
    assert table.rows[0] == ["none", "0.250 (0.235 to 0.267)", "0.50×"]
    assert table.rows[2] == ["dynamic, all answers 32 tokens", "1 (1 to 1)", "2.00×"]
    assert table.best == [(4, 1)]


def busy(runs: list[Run]) -> list[Run]:
    runs[0].measures.other_cpu = 0.9
    return runs


@pytest.mark.parametrize(
    ("continuous", "paged", "reason"),
    [
        (rounds("continuous", 2.0, 3.0, 4.0), rounds("paged", 1.0, 1.5, 2.5), "overlap"),
        (rounds("continuous", 4.0, 4.0), rounds("paged", 2.0, 2.0), "fewer than 3 rounds"),
        (busy(rounds("continuous", 4.0, 4.0, 4.0)), rounds("paged", 2.0, 2.0, 2.0), "0.9 cores"),
        (busy(rounds("continuous", 4.0)), rounds("paged", 2.0), "0.9 cores"),
    ],
)
def test_without_proof_there_is_no_winner(
    continuous: list[Run], paged: list[Run], reason: str
) -> None:
    runs = [*continuous, *paged]
    assert re.match(f"Inconclusive on aws: .*{reason}", verdict.headline(runs))
    assert not tables.summary(runs).best
    order = verdict.order(runs) or ""
    assert order.startswith("paged has 2.00× the requests/s of continuous, which proves no differ")


@pytest.mark.parametrize(("seconds", "is_proved"), [(2.08, False), (2.12, True)])
def test_medians_that_are_close_prove_no_difference(seconds: float, is_proved: bool) -> None:
    runs = [*rounds("continuous", *3 * [seconds]), *rounds("paged", 2.0, 2.0, 2.0)]
    assert verdict.winner(runs, "aws") == ("paged" if is_proved else None)
    assert ("are within 5 % of each other" in verdict.headline(runs)) != is_proved


def packed(loop: str = "closed", **metrics: float) -> list[Run]:
    """Three rounds of continuous, whose last samples have these metrics, and three of paged."""
    samples = [sample(0.0), sample(2.0, **metrics)]
    return [
        *rounds("continuous", 2.0, 2.0, 2.0, samples=samples, loop=loop),
        *rounds("paged", 1.0, 1.0, 1.0, samples=[sample(1.0, running=7.0)], loop=loop),
    ]


def test_scarce_and_plentiful_memory_are_told_apart() -> None:
    scarce = regime(packed(kv_used=0.9, waiting=2.0))
    assert scarce.startswith("KV memory was scarce for continuous: requests waited for it.")
    assert scarce.endswith("ran up to 2 sequences at once, paged up to 7.")
    for metrics in ({"kv_used": 0.7, "waiting": 2.0}, {"kv_used": 0.9, "waiting": 0.0}):
        assert regime(packed(**metrics)).startswith("KV memory was plentiful")
    assert regime(rounds("paged", 1.0, 1.0, 1.0)) == "", "nothing to compare paged with"
    assert kv_tokens(packed()) == 1600


def test_an_overload_is_named() -> None:
    runs = [*in_an_open_loop(0.7, 2.0, "none"), *in_an_open_loop(0.3, 4.0, "paged")]
    assert regime(runs).startswith("Overload: ")
    assert "the fastest kept up with 70 % of their rate" in regime(runs)
    assert verdict.headline(runs).startswith("none serves")


@pytest.mark.parametrize(
    ("latency_s", "text"),
    [(1.0, "paged answers in 1 s (median), none in 2 s"), (1.99, "inconclusive on latency: ")],
)
def test_where_all_keep_up_the_latency_counts(latency_s: float, text: str) -> None:
    runs = [*in_an_open_loop(0.9, 2.0, "none"), *in_an_open_loop(0.9, latency_s, "paged")]
    assert regime(runs).startswith("All servers answered as fast as requests arrived")
    assert verdict.headline(runs).startswith("All servers keep up with ")
    assert text in verdict.headline(runs)


def test_the_order_of_strategies() -> None:
    text = verdict.order(compared().runs) or ""
    pairs = ("dynamic", "none"), ("continuous", "dynamic"), ("paged", "continuous")
    for sentence, (higher, lower) in zip(text.split(". "), pairs, strict=True):
        assert sentence.startswith(f"{higher} has 2.00× the requests/s of {lower}: its steps run ")
    assert verdict.order([run("paged")]) is None


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_a_difference_is_explained_by_what_differs(seconds: float) -> None:
    """It does not matter whether the more elaborate strategy is the faster one."""
    reserved = {"kv_tokens_filled": 160.0, "step_sequences": 10.0, "prefix_hits": 0.0}
    few = [sample(at / 2, **reserved, preemptions=0.0) for at in range(5)]
    slow = rounds("continuous", 2.0, 2.0, 2.0, samples=few)
    fast = rounds("paged", seconds, seconds, seconds)
    text = verdict.order([*slow, *fast]) or ""
    assert f"{2 / seconds:.2f}× the requests/s of continuous: its steps run 2.50 sequ" in text
    assert "fills 50 % of its allocated KV memory against 20 %" in text
    assert "finds 25 % of the prompt tokens in its cache against 0 %" in text
    assert text.endswith("preemptions against 0.")


def measured(run: Run, **causes: float) -> Run:
    """Return the run with these measures set. `queue` is the share of latency spent queueing."""
    queue = causes.pop("queue", None)
    if queue is not None and run.measures.latency is not None:
        run.measures.queue = Spread(**dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 0.0))
        run.measures.queue.mean = queue * run.measures.latency.mean
    for name, value in causes.items():
        setattr(run.measures.inside, name, value)
    return run


def test_host_time_is_named_if_its_share_differs() -> None:
    """Each step of these runs takes 0.1 s."""
    lower, higher = measured(run("continuous"), host_s=0.01), measured(run(), host_s=0.04)
    assert "host time is 40 % of the run against 10 %" in explanation(lower, higher)
    alike = measured(run(), host_s=0.014)
    assert "host time" not in explanation(lower, alike)
    assert "host time" not in explanation(lower, run()), "unknown for one of the runs"


def test_queueing_is_named_if_its_share_differs() -> None:
    lower, higher = measured(run("none"), queue=0.9), measured(run(), queue=0.3)
    assert "its requests queue for 30 % of their latency against 90 %" in explanation(lower, higher)
    assert "queue" not in explanation(lower, measured(run(), queue=0.87))


def test_waiting_for_memory_is_named_if_it_is_known_of_both() -> None:
    short = [sample(at / 2, kv_used=0.9 if at % 2 else 0.5) for at in range(4)]
    lower = run("continuous", samples=short)
    assert "wait for KV memory during 0 % of the run against 50 %" in explanation(lower, run())
    assert "wait for KV memory" not in explanation(run("dynamic", samples=short), run())


def test_padding_is_named_where_a_batch_has_it() -> None:
    """One of the two requests in the batch takes half as long as the other."""
    early = Timings(arrived=100.0, admitted=100.0, first_token=100.5, finished=101.0)
    late = Timings(arrived=100.0, admitted=100.0, first_token=100.5, finished=102.0)
    batch = run("dynamic", records=[record(0, timings=early), record(1, timings=late)])
    assert "padding is 0 % of its slot time against 25 %" in explanation(batch, run("continuous"))
    assert "padding" not in explanation(run("continuous"), run())


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


def test_a_remark_names_a_server_with_unknown_processes() -> None:
    foreign = run()
    foreign.measures.other_cpu = None
    (text,) = verdict.remarks([foreign])
    assert "nothing says whether other processes disturbed it" in text


@pytest.mark.parametrize(("cores", "is_bottleneck"), [(0.81, True), (0.79, False)])
def test_a_busy_client_is_named_as_the_bottleneck(cores: float, is_bottleneck: bool) -> None:
    runs = rounds("vllm", 2.0, 2.0)
    runs[1].measures.client_cpu = cores
    (remark,) = verdict.remarks(runs)
    assert remark.startswith("vllm on aws: the client ")
    assert ("bottleneck: it used 81 % of a core" in remark) == is_bottleneck
