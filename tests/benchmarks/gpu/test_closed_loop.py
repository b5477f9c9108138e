"""The closed-loop clients on a fake clock: their requests, their records and the figures."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine import serve
from benchmarks.load.closed_loop import ClosedLoop
from benchmarks.load.journal import Journal, RequestRecord, percentile, spread_ms
from benchmarks.load.workload import FULL_LOAD, Load, WorkloadRequest
from engine.engine import Engine
from tests.benchmarks.engine.ticking_engine import FakeClock, LateEngine, ticking_engine

GIB = 2**30


def loop_of(batching, clients=2, kind=Engine, **changes):
    clock = FakeClock()
    engine = ticking_engine(clock, batching, kind, **changes)
    return ClosedLoop(engine, clients, clock=clock, sleep=clock.sleep), engine, clock


def requests(*lengths):
    return [WorkloadRequest([1] * prompt, answer) for prompt, answer in lengths]


# Requests


def test_every_pair_of_lengths_is_used_once_before_any_repeats():
    sent = list(islice(FULL_LOAD.requests(1000), 18))
    pairs = [(len(request.prompt), request.max_tokens) for request in sent]
    every = {(p, a) for p in FULL_LOAD.prompt_lengths for a in FULL_LOAD.output_lengths}
    assert set(pairs[:9]) == set(pairs[9:]) == every
    assert pairs[:9] != pairs[9:]
    assert max(token for request in sent for token in request.prompt) < 1000


def test_all_systems_get_the_same_requests():
    one, two = (list(islice(FULL_LOAD.requests(1000), 20)) for _ in range(2))
    assert one == two
    short = list(islice(FULL_LOAD.requests(1000, max_tokens=4), 20))
    assert [request.prompt for request in short] == [request.prompt for request in one]
    assert {request.max_tokens for request in short} == {4}


def test_the_pool_holds_the_longest_sequence_of_every_client():
    load = Load(
        clients=3, prompt_lengths=(1,), output_lengths=(1,), max_model_len=33, num_requests=1
    )
    assert load.pool_blocks(16) == 3 * 3
    assert FULL_LOAD.pool_blocks(16) == 12800


# Figures


def test_percentiles_are_measured_values():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7.0], 0.01) == percentile([7.0], 0.99) == 7
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2


def test_a_spread_is_in_milliseconds():
    assert spread_ms([0.001, 0.002, 0.006]) == {"mean": 3.0, "p50": 2.0, "p99": 6.0}
    assert spread_ms([]) == {"mean": None, "p50": None, "p99": None}


def test_half_an_answer_counts_as_half_a_request():
    whole, half = (
        RequestRecord(WorkloadRequest([1], 4), 10.0),
        RequestRecord(WorkloadRequest([1], 4), 12.0),
    )
    for record, times in ((whole, (11, 12, 14, 15)), (half, (13, 14))):
        for time in times:
            record.add_tokens(time, 1)
    unheard = RequestRecord(WorkloadRequest([1], 4), 13.0)
    figures = Journal(10.0, 15.0, [whole, half, unheard]).figures()
    assert (figures["requests/s"], figures["tokens/s"]) == (1.5 / 5, round(6 / 5))
    assert (figures["requests"], figures["seconds"]) == (1.5, 5.0)
    assert figures["TTFT ms"] == {"mean": 1000, "p50": 1000, "p99": 1000}
    assert figures["ITL ms"] == {"mean": 1250, "p50": 1000, "p99": 2000}


def test_tokens_that_arrive_together_have_no_gap():
    record = RequestRecord(WorkloadRequest([1], 3), 0.0)
    assert record.add_tokens(2.0, 3)
    assert list(record.gaps()) == []
    assert record.wait == 2.0


def test_memory_is_in_gibibytes():
    journal = Journal(0.0, 1.0, held=[2, 4], filled=[1, 2], pool=8)
    expected = {"most": 2.0, "mean": 1.5, "filled": 0.75, "pool": 4.0}
    assert journal.memory(GIB // 2) == expected
    assert set(Journal(0.0, 1.0).memory(GIB).values()) == {None}


# A row of the table


class RealBench(Bench):
    def __init__(self, seconds, events):
        super().__init__(is_dry=False, use_flashinfer=False, seconds=seconds, emit=events.append)


def test_a_case_warms_up_and_then_measures_for_the_rest_of_its_time():
    events, calls, prompts = [], [], []

    def serve_both(requests, seconds):
        sent = list(requests)
        calls.append((len(sent), {request.max_tokens for request in sent}, seconds))
        prompts.append({tuple(request.prompt[:16]) for request in sent})
        record = RequestRecord(sent[0], 0.0)
        record.add_tokens(0.5, sent[0].max_tokens)
        return Journal(0.0, 2.0, [record], held=[2], filled=[1], pool=4, num_preemptions=3)

    serve.measure(RealBench(1000, events), "paged", serve_both, 0.0, num_warm_up=7)
    (warm_up, measured), (event,) = calls, events
    assert warm_up == (7, {serve.WARM_UP_TOKENS}, float("inf"))
    assert measured[:2] == (FULL_LOAD.num_requests, set(FULL_LOAD.output_lengths))
    assert 0 < measured[2] < 1000
    assert not prompts[0] & prompts[1], "else the prefix cache would already hold the prompts"
    row = event["row"]
    assert (row["case"], row["requests/s"], row["preemptions"], row["steps"]) == (
        "paged",
        0.5,
        3,
        1,
    )
    assert row["KV GiB"]["pool"] == pytest.approx(4 * 512 * 1024 / GIB, rel=1e-3)
    assert row["TTFT ms"]["mean"] == 500


def test_a_case_whose_start_took_its_whole_time_serves_nevertheless():
    """The first case on a machine compiles kernels."""
    seconds = []

    def serve_late(requests, seconds_left):
        seconds.append(seconds_left)
        return Journal(0, 0)

    serve.measure(RealBench(0, []), "paged", serve_late, 0.0, num_warm_up=1)
    assert seconds == [float("inf"), serve.SERVED_S]


def test_a_case_that_had_no_time_for_a_token_says_so():
    events = []
    serve.measure(RealBench(99, events), "none", lambda *_: Journal(0, 0), 0.0, num_warm_up=1)
    assert [event["text"] for event in events] == ["none: time was up before the first token"]


# The loop


def test_a_client_sends_its_next_request_when_it_has_its_answer():
    """Every step adds a token: two answers of 2 tokens end by step 2, two more by step 4."""
    loop, engine, _ = loop_of("continuous", kv_reservation="oracle")
    journal = loop.run(requests(*[(3, 2)] * 4))
    assert [record.submitted for record in journal.records] == [0, 0, 2, 2]
    assert [time for time, _ in journal.records[3].arrivals] == [3, 4]
    figures = journal.figures()
    assert (figures["requests/s"], figures["tokens/s"]) == (1.0, 2)
    assert figures["TTFT ms"]["mean"] == figures["ITL ms"]["mean"] == 1000
    assert engine.strategy.memory.num_held_blocks == 0


def test_an_overlapping_engine_gives_the_same_answers_one_step_later():
    loop, *_ = loop_of("paged", kind=LateEngine)
    journal = loop.run(requests(*[(3, 3)] * 4))
    assert [record.num_tokens for record in journal.records] == [3] * 4
    assert [time for time, _ in journal.records[0].arrivals] == [2, 3, 3]


@pytest.mark.parametrize("kind", [Engine, LateEngine])
def test_running_requests_are_aborted_when_time_is_up(kind):
    loop, engine, clock = loop_of("continuous", kind=kind, kv_reservation="oracle")
    journal = loop.run(requests(*[(3, 2)] * 40), seconds=5.0)
    assert journal.end == clock.now == 5.0
    assert not engine.has_work()
    assert engine.strategy.memory.num_held_blocks == 0
    if kind is Engine:
        assert journal.figures()["requests"] == 5.0  # four whole answers, two halves


@pytest.mark.parametrize(("batching", "end"), [("none", 6.0), ("dynamic", 8.0)])
def test_a_static_batch_runs_to_its_end(batching, end):
    loop, engine, _ = loop_of(batching, max_sequences=1 if batching == "none" else 2)
    journal = loop.run(requests(*[(3, 2), (3, 4)] * 9), seconds=5.0)
    assert journal.end == end
    begun = [record for record in journal.records if record.arrivals]
    assert all(record.num_tokens == record.request.max_tokens for record in begun)
    assert not engine.has_work()


def test_waiting_for_a_static_batch_sleeps_and_is_not_a_step():
    loop, _, clock = loop_of("dynamic", clients=1)
    journal = loop.run(requests((3, 2)))
    assert clock.slept == [3.0]  # max_delay_s
    assert len(journal.held) == 2
    assert journal.figures()["TTFT ms"]["mean"] == 4000


def test_held_and_filled_memory_are_recorded():
    """A block has 4 tokens. The prompt of 3 and the first token of its answer fill one."""
    loop, *_ = loop_of("paged", clients=1, num_blocks=10)
    journal = loop.run(requests((3, 3)))
    assert (journal.held, journal.filled, journal.pool) == ([4, 4, 0], [3, 4, 0], 40)
    loop, *_ = loop_of("continuous", clients=1, num_blocks=12)
    journal = loop.run(requests((3, 3)))
    assert (journal.held, journal.filled) == ([48, 48, 0], [3, 4, 0])


def test_preemptions_of_the_run_are_counted():
    loop, *_ = loop_of("paged", num_blocks=3, enable_prefix_caching=False)
    first, second = (loop.run(requests((4, 5), (4, 5))) for _ in range(2))
    assert first.num_preemptions == second.num_preemptions > 0


def test_a_failed_request_is_an_error():
    loop, engine, _ = loop_of("paged")

    def fail(plan, between_tokens=None):
        raise RuntimeError("illegal memory access")

    engine.executor.run = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loop.run(requests((3, 2)))
