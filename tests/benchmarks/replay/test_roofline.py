"""Schedules computed with a roofline, in cases that can be computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.load.lengths import SHAREGPT, Lengths
from benchmarks.replay.forecast import forecast
from benchmarks.replay.roofline import GIB, GPUS, MODELS, Efficiency, Gpu, Hardware, ModelShape
from benchmarks.replay.synthetic import RooflineCost, header_of, poisson, script_of_lengths
from core.configuration.strategy_table import BATCHING_NAMES

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


def figures(batching, *rows, max_length=256, **changes):
    """Serve (second, prompt length, output length) triples."""
    machine = hardware()
    header = header_of(machine, max_length)
    settings = dataclasses.replace(
        header.settings, batching=batching, max_delay_s=0.0, kv_reservation="oracle", **changes
    )
    script = script_of_lengths([(at, Lengths(*lengths)) for at, *lengths in rows], 16)
    found, num_refused = forecast(header, settings, script, RooflineCost(machine))
    assert num_refused == 0
    return found


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_a_single_request_takes_the_sum_of_its_steps(batching):
    # The prompt's step samples the first token, and the last token is never computed.
    found = figures(batching, (3.0, 10, 5))
    expected = sum(step(length) for length in range(10, 15))
    assert found.end_to_end == pytest.approx((expected, expected))
    assert found.first_token[0] == pytest.approx(step(10))
    assert found.tokens_per_s == pytest.approx(5 / expected)


def test_a_request_that_misses_a_batch_waits_for_the_next():
    first = step(10) + step(11) + step(12)
    found = figures("dynamic", (0.0, 10, 3), (0.001, 20, 1))
    assert found.end_to_end[1] == pytest.approx(first + step(20) - 0.001)


@pytest.mark.parametrize("batching", ["continuous", "paged"])
def test_new_requests_join_between_two_steps(batching):
    found = figures(batching, (0.0, 10, 3), (0.001, 20, 1))
    assert found.end_to_end[1] == pytest.approx(step(10) + step(11, 20) + step(12))
    assert found.first_token[1] == pytest.approx(step(10) + step(11, 20) - 0.001)
    assert found.mean_batch == pytest.approx(4 / 3)


def test_unrelated_prompts_share_no_prefix():
    found = figures("paged", (0.0, 64, 1), (1.0, 64, 1))
    assert found.first_token == pytest.approx((step(64), step(64)))


def test_a_sequence_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"needs 16 blocks, but there are 8"):
        figures("paged", (0.0, 10, 3), num_blocks=8)


def test_requests_that_are_too_long_are_refused():
    header = header_of(hardware(), 32)
    script = script_of_lengths([(0.0, Lengths(30, 5)), (0.0, Lengths(3, 5))], 16)
    found, num_refused = forecast(header, header.settings, script, RooflineCost(hardware()))
    assert num_refused == 1
    assert found is not None
    assert found.num_requests == 1


def test_random_requests_have_the_rate_and_the_seed():
    timed = poisson(5.0, 200.0, SHAREGPT, 4096, seed=1)
    assert len(timed) == pytest.approx(1000, rel=0.1)
    assert timed == poisson(5.0, 200.0, SHAREGPT, 4096, seed=1)
    assert timed != poisson(5.0, 200.0, SHAREGPT, 4096, seed=2)


@pytest.mark.parametrize("gpu", GPUS)
def test_gpus_that_share_a_model_sum_over_a_link(gpu):
    one, two = (Hardware(MODELS["llama-3.1-8b"], GPUS[gpu], count) for count in (1, 2))
    assert one.sums_s(100) == 0
    assert two.sums_s(100) > 65 * two.efficiency.sum_s
    assert two.num_kv_tokens > 2 * one.num_kv_tokens
