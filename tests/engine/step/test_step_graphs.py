"""Steps with CUDA graphs, whose capture is imitated on the CPU.

Only the capture is imitated: a replay runs the recorded work again, on the same buffers.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.configuration.kv_layout import KVLayout
from core.plan import BlockTable, Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine import LLM
from engine.attention.paged_step import PagedStep
from engine.staging import Staging
from engine.step.step_inputs import InputBuilder
from kernels.cpu import linear as cpu_linear
from tests.engine.greedy_answers import NUM_NEW, prompts, tokens
from tests.engine.step.graphs import (
    decode_plan,
    mixed_plan,
    with_graphs,
)


@pytest.mark.matrix
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gpt_oss", "mixtral"])
def test_tokens_equal_generate(tiny_model, expected, architecture, overlaps):
    """Prompts are split into chunks and requests are preempted, and still every step is a graph.

    Some steps fill a graph's size, others are padded.
    """
    llm, recorder = with_graphs(
        tiny_model(architecture),
        prompt_sizes=(4, 1024),
        num_kv_blocks={"mistral": 8, "gpt_oss": 11}.get(architecture, 14),
        max_rolling_batch_prefill_tokens=10,
        async_scheduling=overlaps,
    )
    assert tokens(llm) == expected(architecture)
    assert recorder.num_recorded == 3 + 2 * 2
    assert recorder.num_replays == llm.llm_engine.num_steps, "every step ran as a graph"
    assert llm.llm_engine.strategy.num_preemptions > 0


def random_plan(rng, cache):
    """Return decodes, prompts and chunks of prompts in random order.

    Their blocks are scattered and have 4 tokens each. Some continue after a prefix, and some do not
    sample.
    """
    num_blocks = len(cache.blocks[0])
    blocks = rng.sample(range(num_blocks), num_blocks)
    lengths = rng.choice([[1], [1, 1, 2, 5], [2, 3, 6]])
    chunks = []
    for id in range(rng.randint(1, 7)):
        length, start = rng.choice(lengths), rng.randrange(12)
        token_ids = [rng.randrange(1, 60) for _ in range(start + length)]
        sequence = Sequence(id, token_ids, SamplingParams(temperature=0))
        counts = [group.blocks_for(start + length) for group in cache.groups]
        tables = tuple(BlockTable(tuple(blocks.pop() for _ in range(count))) for count in counts)
        chunks.append(Chunk(sequence, start, length, tables, samples_token=rng.random() < 0.8))
    return StepPlan(tuple(chunks))


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "mistral", "mixtral", "gpt_oss", "biogpt"]
)
def test_padded_steps_have_the_logits_of_unpadded_ones(tiny_model, architecture):
    """All bits are equal if matrix products round a row alike beside any number of other rows.

    The same buffers serve all steps, so nothing that a step leaves behind may change the next step.
    Only the blocks of the step's own sequences contain numbers.
    """
    llm, _ = with_graphs(
        tiny_model(architecture), max_rows=6, prompt_sizes=(8, 16), num_kv_blocks=60
    )
    passes, rng, used = llm.llm_engine.executor.passes, random.Random(1), set()
    generator = torch.Generator().manual_seed(1)
    cpu = Staging(torch.device("cpu"))
    unpadded, padded = (InputBuilder(passes.cache.groups, cpu) for _ in range(2))
    is_exact = architecture in ("llama", "gpt2", "mistral") and cpu_linear.is_faster()
    for _ in range(60):
        plan = random_plan(rng, passes.cache)
        size = passes.graphs.size_for(plan.chunks)
        if size is None:
            continue
        used_blocks = [b for chunk in plan.chunks for table in chunk.tables for b in table.blocks]
        for memory in passes.cache.blocks:
            memory.fill_(float("nan"))
            shape = len(used_blocks), memory.shape[1]
            memory[used_blocks] = torch.randn(shape, generator=generator)
        with torch.inference_mode():
            inputs = unpadded.build(plan)
            step = PagedStep(inputs.batches, passes.cache, passes.backend)
            expected = passes.model.forward(inputs, step).float()
            found = passes.graphs.replay(padded.build(plan, size=size), size)
        used.add(size)
        torch.testing.assert_close(found, expected, atol=0 if is_exact else 2e-5, rtol=0)
        for memory in passes.cache.blocks:
            others = sorted(set(range(len(memory))) - set(used_blocks))
            assert memory[others].isnan().all(), "padding writes to no block"
    assert used == set(passes.graphs.sizes)


MAX_OPERATIONS = 10


class OperationCount(TorchDispatchMode):
    """Counts torch's operations, which on CUDA are launches or allocations; views are free."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **kwargs or {})


def test_a_replayed_step_launches_few_operations_whatever_its_size(default_graphs):
    """Before the replay, a step makes its inputs and copies them into the graph's buffers."""
    builder = InputBuilder(KVLayout.uniform(16).groups, Staging(torch.device("cpu")))

    def operations(plan):
        size = default_graphs.size_for(plan.chunks)
        with torch.inference_mode(), OperationCount() as operations:
            default_graphs.replay(builder.build(plan, size=size), size)
        return operations.count

    largest = mixed_plan(200, [700, 3])
    operations(largest)  # then the builder has room for any step
    counts = {operations(plan) for plan in (mixed_plan(2, [5]), mixed_plan(0, [64]), largest)}
    assert max(counts) <= MAX_OPERATIONS


def test_padding_writes_no_block_and_affects_no_row(tiny_model):
    """All blocks except those of the three sequences are poisoned. The graph has four rows."""
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=12)
    executor = llm.llm_engine.executor
    caches = [*executor.passes.cache.keys, *executor.passes.cache.values]
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


def test_a_smaller_step_is_not_affected_by_a_larger_one_before(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=12)
    executor = llm.llm_engine.executor
    for cache in (*executor.passes.cache.keys, *executor.passes.cache.values):
        cache.normal_(generator=torch.Generator().manual_seed(1))

    def logprobs(count):
        result = executor.submit(decode_plan(count), lambda: None).wait()
        return [result[id].logprobs[0] for id in range(count)]

    alone = logprobs(1)
    together = logprobs(4)
    assert logprobs(1) == alone
    assert together[0] == pytest.approx(alone[0], abs=1e-4)


def test_aborts_and_preemption_change_no_other_answer(tiny_model):
    """Steps overlap and run as graphs. Every third request is aborted half-way."""

    def answers(*, aborting):
        llm, _ = with_graphs(
            tiny_model("llama"),
            prompt_sizes=(10,),
            num_kv_blocks=14,
            max_rolling_batch_prefill_tokens=10,
            async_scheduling=True,
        )
        engine, tokens_of = llm.llm_engine, {}
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        ids = [engine.add(prompt, params, 0.0) for prompt in prompts() * 3]
        while engine.has_work():
            for output in engine.step(0.0):
                token_ids = tokens_of.setdefault(output.request_id, [])
                token_ids += output.token_ids
                if aborting and output.request_id % 3 == 0 and len(token_ids) >= NUM_NEW // 2:
                    engine.abort(output.request_id)
        assert engine.strategy.memory.num_held_blocks == 0
        assert engine.strategy.num_preemptions > 0
        return [tokens_of[id] for id in ids]

    kept, whole = answers(aborting=True), answers(aborting=False)
    for id, (left, right) in enumerate(zip(kept, whole, strict=True)):
        assert len(right) == NUM_NEW
        assert left == (right[: NUM_NEW // 2] if id % 3 == 0 else right)


def test_each_forward_pass_of_a_graph_has_its_own_batch(tiny_model, monkeypatch):
    """Backends keep what they compute for a batch.

    If a capture had the warm-up's batch, it would not record this computation.
    """
    batches = []

    def step(batch, *arguments):
        batches.append(batch)
        return PagedStep(batch, *arguments)

    monkeypatch.setattr("engine.step.step_graphs.PagedStep", step)
    llm, recorder = with_graphs(tiny_model("llama"), max_rows=6)
    tokens(llm)
    assert recorder.num_replays > 0
    assert len(batches) == recorder.num_recorded + recorder.num_replays
    assert len({id(batch) for batch in batches}) == len(batches)


def test_memory_does_not_grow(tiny_model):
    llm, _ = with_graphs(
        tiny_model("llama"), prompt_sizes=(64,), num_kv_blocks=40, async_scheduling=True
    )

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
    """Steps overlap and run as graphs.

    A logit bias forces the same tokens and does not affect logprobs.
    """
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
