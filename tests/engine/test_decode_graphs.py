"""Decode steps with CUDA graphs, whose capture is imitated on the CPU.

Only the capture is imitated: a replay runs the work again on the same buffers.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from core.plan import Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine import LLM
from engine.attention.paged_step import PagedStep
from engine.step.decode_graphs import CudaRecorder, DecodeGraphs, buckets
from engine.step.packed_executor import PackedExecutor
from tests.engine.test_equality import NUM_NEW, expected, prompts, tokens  # noqa: F401


class Imitation:
    """Records by keeping the function. Poisons the logits before each replay."""

    def __init__(self):
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, work):
        self.num_recorded += 1
        logits = work()

        def replay():
            self.num_replays += 1
            logits.fill_(float("nan"))
            work()

        return replay


def with_graphs(path, *, max_rows=4, **options):
    """Return an LLM with decode graphs of up to `max_rows`, and their recorder."""
    llm = LLM(path, block_size=4, **{"dtype": "fp32"} | options)
    executor, recorder = llm.llm_engine.executor, Imitation()
    graphs = DecodeGraphs(
        executor.model,
        executor.cache,
        executor.backend,
        recorder,
        max_rows=max_rows,
        max_model_len=llm.facts.max_model_len,
    )
    llm.llm_engine.executor = PackedExecutor(
        executor.model, executor.cache, executor.backend, graphs
    )
    return llm, recorder


def test_buckets_waste_little_and_fit_every_batch():
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    for largest in (7, 64, 100, 256, 300):
        sizes = buckets(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        for rows in range(1, largest + 1):
            bucket = next(size for size in sizes if size >= rows)
            assert bucket < 2 * rows or bucket <= 8
            assert bucket - rows < max(8, rows / 4 + 1)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gpt_oss", "mixtral"])
def test_tokens_equal_generate(tiny_model, expected, architecture, overlaps):  # noqa: F811
    """With preemption and chunked prompts in between, in batches that fill a bucket or do not."""
    llm, recorder = with_graphs(
        tiny_model(architecture),
        num_kv_blocks=14,
        max_rolling_batch_prefill_tokens=10,
        async_scheduling=overlaps,
    )
    assert tokens(llm) == expected(architecture)
    assert recorder.num_recorded == 3
    assert recorder.num_replays > NUM_NEW
    assert llm.llm_engine.strategy.num_preemptions > 0


def decode_plan(count, num_tokens=5, *, samples=True):
    """Return a step of `count` sequences with two blocks each, from block 1 on."""
    return StepPlan(
        tuple(
            Chunk(
                Sequence(id, [1 + id] * num_tokens, SamplingParams(temperature=0)),
                num_tokens - 1,
                1,
                (1 + 2 * id, 2 + 2 * id),
                samples,
            )
            for id in range(count)
        )
    )


def test_a_step_uses_the_smallest_graph_that_fits(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), max_rows=6, num_kv_blocks=40)
    graphs = llm.llm_engine.executor.graphs
    sizes = [graphs.graph_for(decode_plan(count)) for count in range(1, 8)]
    assert [size and size.num_rows for size in sizes] == [1, 2, 4, 4, 6, 6, None]


def test_prompts_and_unfinished_chunks_use_no_graph(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=40)
    graphs = llm.llm_engine.executor.graphs
    assert graphs.graph_for(decode_plan(2, samples=False)) is None
    sequence = Sequence(0, [1, 2], SamplingParams())
    assert graphs.graph_for(StepPlan((Chunk(sequence, 0, 2, (1,), True),))) is None


def test_a_warm_up_that_waits_for_the_device_fails_before_the_capture(monkeypatch):
    """A failed capture leaves torch's memory pool open; the real stream is replaced by a list."""
    events, modes = [], ["default"]

    class Stream:
        def wait_stream(self, other):
            pass

    @contextmanager
    def capture(graph, pool, stream):
        events.append("capture")
        yield

    for name, value in {
        "graph_pool_handle": lambda: "pool",
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: events.append("replay")),
        "graph": capture,
        "get_sync_debug_mode": lambda: modes[-1],
        "set_sync_debug_mode": modes.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def waits():
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="synchronizing"):
        recorder.record(waits)
    assert (events, modes[-1]) == ([], "default")
    recorder.record(lambda: events.append(modes[-1]))()
    assert events == ["error", "capture", "default", "replay"]


def test_padding_writes_no_block_and_affects_no_row(tiny_model):
    """All blocks but those of the three sequences are poisoned; the bucket has four rows."""
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=12)
    executor = llm.llm_engine.executor
    caches = [*executor.cache.keys, *executor.cache.values]
    for cache in caches:
        cache.fill_(float("nan"))
        cache[1:7] = 0.5
    before = [cache.clone() for cache in caches]
    executor.submit(decode_plan(3), lambda: None).wait()
    for cache, old in zip(caches, before, strict=True):
        changed = (cache != old) & ~(cache.isnan() & old.isnan())
        blocks, slots = changed.any(-1).any(-1).nonzero(as_tuple=True)
        assert blocks.tolist() == [2, 4, 6], "position 4 is the first of the second block"
        assert slots.tolist() == [0, 0, 0]
    contexts = executor.graphs._buffers._context_lens
    assert contexts.tolist() == [5, 5, 5, 0], "padding reads nothing either"


def test_a_smaller_step_is_not_affected_by_a_larger_one_before(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=12)
    executor = llm.llm_engine.executor
    for cache in (*executor.cache.keys, *executor.cache.values):
        cache.normal_(generator=torch.Generator().manual_seed(1))

    def logprobs(count):
        result = executor.submit(decode_plan(count), lambda: None).wait()
        return [result[id].logprobs[0] for id in range(count)]

    alone = logprobs(1)
    together = logprobs(4)
    assert logprobs(1) == alone
    assert together[0] == pytest.approx(alone[0], abs=1e-4)


def test_progress_covers_every_capture(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=12)
    executor, seen = llm.llm_engine.executor, []

    def progress(sizes):
        for size in sizes:
            yield size
            seen.append(size)

    DecodeGraphs(
        executor.model, executor.cache, executor.backend, Imitation(),
        max_rows=4, max_model_len=32, progress=progress,
    )  # fmt: skip
    assert seen == [4, 2, 1]


def test_aborts_and_preemption_change_no_other_answer(tiny_model):
    """With overlap and graphs; every third request is aborted half-way."""

    def answers(*, aborting):
        llm, _ = with_graphs(
            tiny_model("llama"),
            num_kv_blocks=14,
            max_rolling_batch_prefill_tokens=10,
            async_scheduling=True,
        )
        engine, tokens_of = llm.llm_engine, {}
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        ids = [engine.add(prompt, params, 0.0) for prompt in prompts() * 3]
        while engine.has_work():
            for output in engine.step(0.0):
                tokens_of.setdefault(output.request_id, []).extend(output.token_ids)
                if aborting and output.request_id % 3 == 0 and len(tokens_of) > 1:
                    engine.abort(output.request_id)
        assert engine.strategy.memory.num_held_blocks == 0
        assert engine.strategy.num_preemptions > 0
        return [tokens_of[id] for id in ids]

    kept, whole = answers(aborting=True), answers(aborting=False)
    for id, (left, right) in enumerate(zip(kept, whole, strict=True)):
        assert len(right) == NUM_NEW
        assert left == (right[: len(left)] if id % 3 == 0 else right)


def test_each_forward_pass_of_a_graph_has_its_own_batch(tiny_model, monkeypatch):
    """Backends keep what they compute for a batch. A capture must compute what its warm-up did."""
    batches = []

    def step(batch, *arguments):
        batches.append(batch)
        return PagedStep(batch, *arguments)

    monkeypatch.setattr("engine.step.decode_graphs.PagedStep", step)
    llm, recorder = with_graphs(tiny_model("llama"), max_rows=6)
    tokens(llm)
    assert recorder.num_replays > 0
    assert len(batches) == recorder.num_recorded + recorder.num_replays
    assert len({id(batch) for batch in batches}) == len(batches)


def test_memory_does_not_grow(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=40, async_scheduling=True)

    def tensors():
        gc.collect()
        return [held for held in gc.get_objects() if issubclass(type(held), torch.Tensor)]

    def tensors_after(num_rounds):
        for _ in range(num_rounds):
            tokens(llm, repetition_penalty=1.2)
        return len(tensors())

    of_others = tensors()  # kept alive, so that none of other tests' tensors is freed meanwhile
    assert tensors_after(2) == tensors_after(6)
    assert of_others


def test_logprobs_in_bf16_are_near_those_in_fp32(tiny_model):
    """With overlap and graphs. A logit bias forces the same tokens and does not affect logprobs."""
    params = SamplingParams(
        temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logit_bias={7: 1e5}, logprobs=0
    )

    def logprobs(llm):
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        return torch.tensor(
            [[place[7].logprob for place in output.outputs[0].logprobs] for output in outputs]
        )

    path = tiny_model("llama")
    low, recorder = with_graphs(path, max_rows=6, dtype="bf16", async_scheduling=True)
    found, exact = logprobs(low), logprobs(LLM(path, dtype="fp32", block_size=4))
    assert recorder.num_replays >= NUM_NEW - 1
    assert not torch.equal(found, exact), "the computation must really be bf16"
    torch.testing.assert_close(found, exact, atol=0.15, rtol=0)
