"""Decode steps on a fake clock: bytes read, duration, and a breakdown of the time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.derived import derived
from benchmarks.gpu.engine import profile, roofline, steady_decode
from benchmarks.gpu.engine.steady_decode import SteadyDecode
from benchmarks.gpu.shapes import (
    LLAMA_2_7B,
    LLAMA_3_1_8B,
    QWEN3_0_6B,
    SHAPES,
    decode_bytes,
    kv_bytes_per_token,
    write_config,
)
from benchmarks.gpu.trace import Interval, Trace, busy_us, idle_us, read, record, short_name
from engine.engine import Engine
from tests.benchmarks.engine.ticking_engine import FakeClock, LateEngine, ticking_engine

# Bytes and ceilings


@pytest.mark.parametrize(
    ("shape", "num_parameters"),
    [("llama-2-7b", 6_738_415_616), ("llama-3.1-8b", 8_030_261_248), ("qwen3-0.6b", 596_049_920)],
)
def test_shapes_have_the_published_parameter_counts(shape, num_parameters, tmp_path):
    write_config(SHAPES[shape], tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.max_position_embeddings == SHAPES[shape]["max_position_embeddings"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert sum(weight.numel() for weight in model.parameters()) == num_parameters


def test_kv_bytes_of_a_token():
    assert kv_bytes_per_token(LLAMA_2_7B, 2) == 512 * 1024
    assert kv_bytes_per_token(LLAMA_3_1_8B, 2) == 128 * 1024
    assert kv_bytes_per_token(QWEN3_0_6B, 2) == 28 * 2 * 8 * 128 * 2


def test_a_decode_step_reads_weights_and_kv_but_no_untied_embedding():
    weights = 13_476_831_232
    embedding = 32000 * 4096 * 2
    expected = weights - embedding + 100 * 512 * 1024
    assert decode_bytes(LLAMA_2_7B, weights, 100, 2) == expected
    assert decode_bytes(QWEN3_0_6B, 1000, 0, 2) == 1000


def test_a_step_as_a_fraction_of_its_roofline():
    row = {"bytes": 4_000_000, "step us": 2.0, "GPU us": 1.25}
    figures = derived("roofline", row, [row], {"GB/s": 4000.0})
    assert figures == {"roofline us": 1.0, "of roofline": 0.5, "GPU of roofline": 0.8}
    assert derived("roofline", row, [row], {}) == {}


# Steps


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(steady_decode, "PROMPT", 8)
    monkeypatch.setattr(steady_decode, "OUTPUT", 30)
    monkeypatch.setattr(steady_decode, "MIN_GENERATED", 2)


def bench_of(events, **changes):
    settings = {"is_dry": True, "use_flashinfer": False, "seconds": 60.0, "emit": events.append}
    return Bench(**(settings | changes))


class RealBench(Bench):
    """A bench of a timed run."""

    def __init__(self):
        super().__init__(is_dry=False, use_flashinfer=False, seconds=60.0, emit=print)


@pytest.mark.parametrize("kind", [Engine, LateEngine])
def test_a_step_lasts_from_one_token_to_the_next(short, kind):
    """Two prompts of 8 tokens fill a step of 16. Both answers have 2 tokens when timing begins."""
    clock = FakeClock()
    engine = ticking_engine(clock, "paged", kind)
    with SteadyDecode(RealBench(), engine, 2, clock) as decode:
        steps = decode.run(4)
        again = decode.run(2)
    assert steps.seconds == again.seconds == 1.0
    assert steps.kv_tokens == 2 * (10 + 11 + 12 + 13) / 4
    assert again.kv_tokens == 2 * (14 + 15) / 2
    assert clock.now < 12, "the sequences were aborted, not finished"
    assert not engine.has_work()
    assert engine.strategy.memory.num_held_blocks == 0


@pytest.mark.parametrize("kind", [Engine, LateEngine])
def test_a_prompt_joins_every_step(short, kind):
    clock = FakeClock()
    engine = ticking_engine(clock, "paged", kind)
    with SteadyDecode(RealBench(), engine, 2, clock) as decode:
        num_steps, num_tokens = engine.num_steps, engine.num_step_tokens
        steps = decode.run(5, prompt_tokens=3)
        num_steps, num_tokens = engine.num_steps - num_steps, engine.num_step_tokens - num_tokens
    assert steps.seconds == 1.0
    assert num_tokens == num_steps * (2 + 3)
    assert not engine.has_work()


def test_an_answer_that_ends_too_early_is_an_error(short, monkeypatch):
    monkeypatch.setattr(steady_decode, "OUTPUT", 5)
    clock = FakeClock()
    with (
        pytest.raises(RuntimeError, match="a sequence finished: length"),
        SteadyDecode(RealBench(), ticking_engine(clock, "paged"), 2, clock) as decode,
    ):
        decode.run(4)


def test_batches_that_do_not_fit_are_skipped(short):
    clock, bench = FakeClock(), RealBench()
    engine = ticking_engine(clock, "paged", num_blocks=20)
    assert steady_decode.has_room_for(bench, engine, 2)  # each needs 10 blocks of 4 tokens
    assert not steady_decode.has_room_for(bench, engine, 3)


# Traces


def intervals(*spans):
    return [Interval("k", begin, end) for begin, end in spans]


def test_busy_time_counts_overlaps_once():
    assert busy_us(intervals((0, 10), (5, 12), (20, 30), (22, 24))) == 22
    assert busy_us([]) == 0


def test_idle_time_is_split_into_gaps_between_and_within_steps():
    """Three steps of two kernels each, with gaps of 1 within a step and of 9 between steps."""
    steps = intervals((0, 3), (4, 8), (17, 20), (21, 25), (34, 37), (38, 42))
    assert idle_us(steps, 3) == (18, 3)
    assert idle_us(reversed(steps), 1) == (0, 21)
    assert idle_us([], 3) == (0, 0)


def event(category, name, ts, dur):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur}


def test_a_trace_has_device_work_and_driver_calls():
    trace = read([
        event("kernel", "b", 10.5, 2.0),
        event("kernel", "a", 13, 7),
        event("kernel", "b", 21, 3),
        event("gpu_memcpy", "Memcpy DtoH", 24, 1),
        event("gpu_user_annotation", "a range over all of them", 0, 100),
        event("cpu_op", "aten::add", 0, 5),
        event("cuda_runtime", "cudaLaunchKernel", 1, 4),
        event("cuda_driver", "cuLaunchKernel", 6, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 8, 16),
        event("cuda_runtime", "cudaMemcpyAsync", 30, 3),
        {"ph": "M", "name": "process_name"},
    ])  # fmt: skip
    assert trace.by_name() == [("a", 1, 7), ("b", 2, 5), ("Memcpy DtoH", 1, 1)]
    assert (trace.waiting_us, trace.calling_us) == (19, 6)
    assert busy_us(trace.work) == 13


def test_the_warm_up_is_not_recorded():
    def call(name):
        with torch.profiler.record_function(name):
            return torch.ones(3).add(1)

    trace, result = record(torch.device("cpu"), partial(call, "before"), partial(call, "run"))
    names = [name for name, _, _ in trace.by_name()]
    assert names.count("aten::add") == 1
    assert sum(interval.name == "aten::add" for interval in trace.work) == 1
    assert result.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("_decode_kernel", "_decode_kernel"),
        ("void at::native::reduce<512>(at::Tensor, int (*)(int))", "reduce<512>"),
        ("void at::native::(anonymous namespace)::copy<float>(int)", "copy<float>"),
        ("x" * 90, "x" * 69 + "…"),
    ],
)
def test_kernel_names_are_shortened(kernel, short):
    assert short_name(kernel) == short


# Sections


def test_the_parts_of_a_step_sum_to_its_time(monkeypatch):
    work = [Interval("attention", 0, 30), Interval("gemm", 40, 90), Interval("attention", 200, 230)]
    calls = [Interval("cudaGraphLaunch", 0, 8), Interval("cudaEventSynchronize", 10, 60)]
    monkeypatch.setattr(profile, "NUM_STEPS", 2)
    monkeypatch.setattr(profile, "NUM_KERNELS", 1)
    trace = Trace(work, calls)
    gpu = {what: (calls, us) for _, what, calls, us in profile.gpu_parts(trace)}
    assert gpu == {
        "attention": (1, 30),
        "1 others": (0.5, 25),
        "sum of all": (1.5, 55),
        "busy": (None, 55),
        "idle between steps": (None, 55),
        "idle within steps": (None, 5),
    }
    host = list(profile.host_parts(trace, {"schedule": 3.0, "commit": 2.0}, 100.0))
    assert sum(us for *_, us in host) == 100
    assert {what: us for _, what, _, us in host}["waiting for the GPU"] == 25


def test_schedule_and_commit_are_timed_and_restored(monkeypatch):
    clock = FakeClock()
    engine = ticking_engine(clock, "paged")
    own = type(engine.strategy).schedule

    def slow(self, now):
        clock.now += 7
        return own(self, now)

    monkeypatch.setattr(type(engine.strategy), "schedule", slow)
    with profile.timed_methods(engine.strategy, clock) as spent:
        assert engine.strategy.schedule(0.0) is None
        assert engine.strategy.schedule(0.0) is None
    assert spent == {"schedule": 14}
    engine.strategy.schedule(0.0)
    assert spent == {"schedule": 14}


def test_the_roofline_continues_after_a_batch_fails(monkeypatch):
    events = []

    def fail(bench, engine, batch):
        if batch == 3:
            raise RuntimeError("no such step")
        bench.row(batch=batch)

    monkeypatch.setattr(roofline, "_row", fail)
    monkeypatch.setattr(roofline, "decoding_engine", lambda *_: None)
    monkeypatch.setattr(roofline, "has_room_for", lambda *_: True)
    roofline.run(bench_of(events))
    assert [event.get("row") or event["text"] for event in events] == [
        "batch 3 failed: RuntimeError: no such step",
        {"batch": 1},
    ]
