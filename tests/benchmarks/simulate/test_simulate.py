"""The simulator: clock, costs and figures in cases that can be computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.load.lengths import SHAREGPT, Lengths
from benchmarks.simulate.cost import (
    GIB,
    GPUS,
    MODELS,
    Efficiency,
    Gpu,
    Hardware,
    ModelShape,
    num_pairs,
)
from benchmarks.simulate.fleet import Fleet
from benchmarks.simulate.knee import highest_rate
from benchmarks.simulate.system import SYSTEMS, Setup
from benchmarks.simulate.tally import Tally
from benchmarks.simulate.traffic import Arrival, Prefixes, Synthetic, Trace
from core.output import Output
from core.routing import LeastLoaded, RoundRobin
from core.sampling import Finish

TOY = ModelShape(
    name="toy", num_parameters=1e6, num_layers=1, attention_width=256, kv_width=256
)  # 2e6 bytes of weights, 1024 bytes of K/V per token


def hardware(kv_tokens=4096, **efficiency):
    """1e8 bytes and 1e12 FLOP per second: 20 ms for the weights, 10.24 us per token of K/V."""
    memory = (2e6 + 1024 * (kv_tokens + 0.5)) / GIB
    gpu = Gpu(name="toy", memory_gib=memory, bandwidth=1e8, flops=1e12, link=1e9)
    given = Efficiency(**({"bandwidth": 1.0, "flops": 1.0, "overhead_s": 0.001} | efficiency))
    return Hardware(TOY, gpu, 1, given, memory_utilization=1.0)


def step(*num_kv_tokens):
    """Return the seconds of a memory-bound step; num_kv_tokens: K/V tokens of each sequence."""
    return 0.02 + sum(num_kv_tokens) * 1024 / 1e8 + 0.001


def arrivals(*rows, prefix_tokens=0):
    """Return arrivals for (second, prompt length, output length) triples."""
    return [
        Arrival(id, at_s, Lengths(prompt, generated), 0, prefix_tokens)
        for id, (at_s, prompt, generated) in enumerate(rows)
    ]


def fleet(system, requests, *, num_machines=1, router=None, **setup):
    given = {"hardware": hardware(), "max_length": 256} | setup
    router = router or RoundRobin()
    return Fleet(Setup(**given), SYSTEMS[system], requests, router, num_machines)


def latencies(system, requests, **setup):
    served = fleet(system, requests, **setup)
    served.run()
    return served.tally.latencies


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_single_request_takes_the_sum_of_its_steps(system):
    # The prompt's step samples the first token, and the last token is never computed.
    expected = sum(step(length) for length in range(10, 15))
    found = latencies(system, arrivals((3.0, 10, 5)))
    assert found == {0: pytest.approx(expected)}


def test_the_first_token_comes_with_the_prefill_step():
    served = fleet("paged", arrivals((3.0, 10, 5)))
    figures = served.run().figures
    assert served.tally.first_tokens == {0: pytest.approx(step(10))}
    assert figures.normalized_latency == pytest.approx(sum(map(step, range(10, 15))) / 5)
    assert figures.tokens_per_s == pytest.approx(5 / sum(map(step, range(10, 15))))


def test_a_request_that_misses_a_static_batch_waits_for_the_next():
    requests = arrivals((0.0, 10, 2), (0.0, 20, 4), (0.01, 5, 1))
    # The first request forms a batch alone; those that arrive meanwhile form the next.
    first = step(10) + step(11)
    expected = {0: first, 1: first + step(20, 5) + step(21) + step(22) + step(23)}
    expected[2] = first + step(20, 5) - 0.01
    found = latencies("dynamic", arrivals((0.0, 10, 2), (0.001, 20, 4), (0.01, 5, 1)))
    expected[1] -= 0.001
    assert found == pytest.approx(expected)
    # Two that arrive at once form a batch. The third waits until the longest of them ends.
    batch = [step(10, 20), step(11, 21), step(22), step(23)]
    assert latencies("dynamic", requests) == pytest.approx({
        0: sum(batch[:2]), 1: sum(batch), 2: sum(batch) + step(5) - 0.01
    })  # fmt: skip


def test_a_padded_batch_answers_all_at_its_end():
    found = latencies("fastertransformer", arrivals((0.0, 10, 2), (0.0, 20, 4)))
    batch = sum(step(length, length) for length in (20, 21, 22, 23))
    assert found == pytest.approx({0: batch, 1: batch})


def test_a_padded_batch_reserves_the_greatest_length_for_every_row():
    requests = arrivals((0.0, 10, 2), (0.0, 10, 2), (0.0, 10, 2))
    found = latencies("fastertransformer", requests, hardware=hardware(600))
    batch = step(10, 10) + step(11, 11)
    assert found == pytest.approx({0: batch, 1: batch, 2: batch + step(10) + step(11)})


def test_new_requests_join_between_two_steps():
    requests = arrivals((0.0, 10, 3), (0.001, 20, 1))
    joined = step(10) + step(11, 20)
    for system in ("orca-oracle", "paged"):
        assert latencies(system, requests) == pytest.approx({
            0: joined + step(12), 1: joined - 0.001
        })  # fmt: skip


def test_reservations_limit_the_requests_that_run_at_once():
    requests = arrivals((0.0, 16, 16), (0.0, 16, 16), (0.0, 16, 16))

    def at_once(system):
        return fleet(system, requests, hardware=hardware(300)).run().mean_batch

    assert at_once("orca-max") == 1.0
    assert at_once("orca-oracle") == at_once("paged") == 3.0


def test_a_long_prompt_is_compute_bound():
    slow = Gpu(name="slow", memory_gib=0.01, bandwidth=1e12, flops=1e9, link=1e18)
    efficiency = Efficiency(bandwidth=0.5, flops=0.5, overhead_s=0.25, sum_s=0.0)
    machine = Hardware(TOY, slow, 2, efficiency)
    pairs = num_pairs(0, 100)
    assert pairs == 100 * 101 // 2
    assert num_pairs(5, 2) == 6 + 7
    flops = 2e6 * 100 + 4 * 256 * pairs
    assert machine.step_s(100, pairs, 100) == pytest.approx(flops / (2 * 0.5e9) + 0.25)


def test_gpus_sum_two_times_per_layer_and_once_for_the_embedding():
    """In a ring of four GPUs, each sends two times three quarters of the hidden states."""
    gpu = Gpu(name="a", memory_gib=1, bandwidth=1e30, flops=1e30, link=1e6)
    efficiency = Efficiency(overhead_s=0.0, link=0.5, sum_s=1e-3)
    sums = 2 * TOY.num_layers + 1
    sent = 1.5 * TOY.attention_width * 2 * 10
    expected = sums * (1e-3 + sent / 0.5e6)
    assert Hardware(TOY, gpu, 4, efficiency).step_s(10, 0, 0) == pytest.approx(expected)
    assert Hardware(TOY, gpu, 1, efficiency).step_s(10, 0, 0) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("model", "gpu", "count", "slots"),
    [("opt-13b", "a100-40gb", 1, 15_700), ("opt-66b", "a100-40gb", 4, 9_700),
     ("opt-175b", "a100-80gb", 8, 60_100)],
)  # fmt: skip
def test_kv_memory_is_about_that_of_the_paper(model, gpu, count, slots):
    """Compare with table 1 of the PagedAttention paper, "max. # KV cache slots"."""
    machine = Hardware(MODELS[model], GPUS[gpu], count)
    assert machine.num_kv_tokens == pytest.approx(slots, rel=0.06)


def test_every_request_is_answered_exactly_once():
    requests = Synthetic(SHAREGPT, 256, seed=1).arrivals(20, 10)
    for system in SYSTEMS:
        served = fleet(system, requests, num_machines=3)
        outcome = served.run()
        assert sorted(served.tally.latencies) == [request.id for request in requests]
        assert sum(outcome.loads) == outcome.figures.num_requests == len(requests)
        assert all(not machine.strategy.has_work() for machine in served.machines)
        assert all(machine.strategy.memory.num_held_blocks == 0 for machine in served.machines)


def test_a_request_that_finishes_twice_is_an_error():
    served = fleet("paged", arrivals((0.0, 10, 2)))
    served.run()
    with pytest.raises(AssertionError, match="finished twice"):
        served.tally.add([Output(0, (), (), Finish.LENGTH)], 1.0)


def test_the_lower_bound_of_the_mean_latency():
    one, other = arrivals((1.0, 10, 4), (2.0, 10, 5))
    tally = Tally([one, other])
    assert tally.least_normalized_latency(2.0) == 0.0  # no arrivals yet
    tally.begin(one)
    tally.begin(other)
    assert tally.least_normalized_latency(3.0) == pytest.approx((2 / 4 + 1 / 5) / 2)
    tally.add([Output(one.id, (), (), Finish.LENGTH)], 5.0)
    assert tally.least_normalized_latency(7.0) == pytest.approx((4 / 4 + 5 / 5) / 2)
    tally.add([Output(other.id, (), (), Finish.LENGTH)], 12.0)
    assert tally.least_normalized_latency(99.0) == pytest.approx((4 / 4 + 10 / 5) / 2)
    assert tally.figures().normalized_latency == pytest.approx((4 / 4 + 10 / 5) / 2)


def test_an_overloaded_run_is_stopped_early():
    requests = Synthetic(SHAREGPT, 256).arrivals(50, 4)
    whole, given_up = fleet("none", requests), fleet("none", requests)
    bound = whole.run().figures.normalized_latency
    assert given_up.run(bound / 4) is None
    assert given_up.machines[0].num_steps < whole.machines[0].num_steps / 2
    assert fleet("none", requests).run(bound * 1.0001) is not None
    assert fleet("none", requests).run(bound * 0.9999) is None


def test_routers_see_unfinished_requests():
    """Request 0 is long and request 1 short, so request 3 finds the machine of request 1 idle."""
    rows = [(0.0, 10, 50), (0.0, 10, 1), (step(10) - 0.001, 10, 1), (step(10) + 0.5, 10, 1)]
    served = fleet("paged", arrivals(*rows), num_machines=2, router=LeastLoaded())
    assert served.run().loads == (2, 2)
    # Request 2 arrives a millisecond before request 1 ends, so it joins request 0.
    assert served.tally.latencies[2] > step(10)


def test_a_cached_prefix_is_computed_once_per_machine():
    requests = arrivals((0.0, 8, 1), (1000.0, 8, 1), prefix_tokens=64)
    flops_bound = {"hardware": hardware(flops=1e-6, overhead_s=0.0)}
    cold = latencies("paged", requests, **flops_bound)
    warm = latencies("paged", requests, **flops_bound, caches_prefixes=True)
    assert cold[1] == pytest.approx(cold[0])
    assert warm[0] == pytest.approx(cold[0])
    assert warm[1] < cold[1] / 8


def test_a_rate_changes_only_the_arrival_times():
    traffic = Synthetic(SHAREGPT, 2048, Prefixes(4, 100), seed=7)
    slow, fast = traffic.arrivals(1, 200), traffic.arrivals(2, 200)
    assert 350 < len(fast) < 450
    assert traffic.arrivals(1, 200) == slow
    for one, other in zip(slow, fast, strict=False):
        assert (one.lengths, one.prefix) == (other.lengths, other.prefix)
        assert one.at_s == pytest.approx(2 * other.at_s)
        assert 100 + one.lengths.prompt + one.lengths.generated <= 2048
    assert {arrival.prefix for arrival in slow} == {0, 1, 2, 3}


def test_a_trace_is_stretched_to_the_rate():
    rows = [
        (5.0, Lengths(9, 9)),
        (6.0, Lengths(999, 9)),
        (7.0, Lengths(8, 8)),
        (9.0, Lengths(7, 7)),
    ]
    trace = Trace(rows, 100)
    assert (trace.rate, trace.num_left_out) == (0.5, 1)
    assert [arrival.at_s for arrival in trace.arrivals(0.5, 60)] == [0.0, 2.0, 4.0]
    assert [arrival.at_s for arrival in trace.arrivals(0.25, 60)] == [0.0, 4.0, 8.0]
    assert [arrival.lengths.prompt for arrival in trace.arrivals(0.25, 8.0)] == [9, 8]
    with pytest.raises(ValueError, match="at most 8 tokens"):
        Trace(rows, 8)


@pytest.mark.parametrize("limit", [0.003, 0.4, 1.0, 37.0])
def test_the_knee_is_found_within_its_precision(limit):
    tried = []

    def attempt(rate):
        tried.append(rate)
        return rate if rate <= limit else None

    rate, found = highest_rate(attempt)
    assert found == rate
    assert limit / 1.03 <= rate <= limit
    assert len(tried) < 16
    assert highest_rate(lambda rate: None) is None


def test_saturation_is_at_the_computed_rate():
    """If one request runs at a time, the highest rate is about one request per service time."""
    seconds = sum(step(length) for length in range(100, 120))
    requests = {
        rate: [Arrival(n, n / rate, Lengths(100, 20)) for n in range(200)]
        for rate in (0.95 / seconds, 1.3 / seconds)
    }
    calm, busy = (fleet("none", request).run().figures for request in requests.values())
    assert calm.normalized_latency == pytest.approx(seconds / 20)
    assert busy.requests_per_s == pytest.approx(1 / seconds, rel=0.01)
    assert busy.normalized_latency > 10 * calm.normalized_latency


def test_requests_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="use more GPUs"):
        fleet("paged", arrivals((0.0, 1, 1)), hardware=hardware(255))
    too_small = Hardware(MODELS["opt-66b"], GPUS["a10g"])
    with pytest.raises(ValueError, match="room for 0 tokens"):
        fleet("paged", arrivals((0.0, 1, 1)), hardware=too_small)
