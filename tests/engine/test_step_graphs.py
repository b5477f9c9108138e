"""Steps with CUDA graphs, whose capture is imitated on the CPU.

Only the capture is imitated: a replay runs the work again on the same buffers.
"""

from __future__ import annotations

import gc
import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.plan import Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from core.step_size import DEFAULT_PROMPT_SIZES, StepSize, decode_sizes, graph_sizes
from engine import LLM
from engine.attention.paged_step import PagedStep
from engine.inputs import InputBuilder
from engine.staging import Staging
from engine.step.cuda_recorder import CudaRecorder
from engine.step.packed_executor import PackedExecutor
from engine.step.step_graphs import MAX_CAPTURE_SECONDS, StepGraphs
from kernels.cpu import linear as cpu_linear
from tests.engine.test_equality import NUM_NEW, expected, prompts, tokens  # noqa: F401


class Imitation:
    """Records by keeping the function. Poisons the logits before each replay."""

    def __init__(self, bound=()):
        """bound: the answers of `is_launch_bound`, in turn; then always True."""
        self.num_recorded = 0
        self.num_replays = 0
        self._bound = list(bound)

    def is_launch_bound(self, work):
        work()
        return self._bound.pop(0) if self._bound else True

    def record(self, work):
        self.num_recorded += 1
        logits = work()

        def replay():
            self.num_replays += 1
            logits.fill_(float("nan"))
            work()

        return replay


def with_graphs(path, *, max_rows=4, prompt_sizes=(), **options):
    """Return an LLM with graphs of up to `max_rows` sequences, and their recorder."""
    llm = LLM(path, block_size=4, **{"dtype": "fp32"} | options)
    executor, recorder = llm.llm_engine.executor, Imitation()
    parts = executor.model, executor.cache, executor.backend
    sizes = graph_sizes(max_rows, llm.facts.max_step_tokens, prompt_sizes)
    graphs = StepGraphs(*parts, recorder, sizes, max_model_len=llm.facts.max_model_len)
    llm.llm_engine.executor = PackedExecutor(*parts, graphs)
    return llm, recorder


def test_decode_sizes_waste_little_and_fit_every_batch():
    assert decode_sizes(1) == [1]
    assert decode_sizes(6) == [1, 2, 4, 6]
    for largest in (7, 64, 100, 256, 300):
        sizes = decode_sizes(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        for rows in range(1, largest + 1):
            bucket = next(size for size in sizes if size >= rows)
            assert bucket < 2 * rows or bucket <= 8
            assert bucket - rows < max(8, rows / 4 + 1)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gpt_oss", "mixtral"])
def test_tokens_equal_generate(tiny_model, expected, architecture, overlaps):  # noqa: F811
    """With preemption and chunked prompts in between, in batches that fill a size or do not."""
    llm, recorder = with_graphs(
        tiny_model(architecture),
        prompt_sizes=(4, 1024),
        num_kv_blocks=14,
        max_rolling_batch_prefill_tokens=10,
        async_scheduling=overlaps,
    )
    assert tokens(llm) == expected(architecture)
    assert recorder.num_recorded == 3 + 2 * 2
    assert recorder.num_replays == llm.llm_engine.num_steps, "every step ran as a graph"
    assert llm.llm_engine.strategy.num_preemptions > 0


def decode_plan(count, num_tokens=5):
    """Return a step of `count` sequences with two blocks each, from block 1 on."""
    return StepPlan(
        tuple(
            Chunk(
                Sequence(id, [1 + id] * num_tokens, SamplingParams(temperature=0)),
                num_tokens - 1,
                1,
                (1 + 2 * id, 2 + 2 * id),
                samples=True,
            )
            for id in range(count)
        )
    )


def test_a_step_uses_the_smallest_graph_that_fits(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), max_rows=6, num_kv_blocks=40)
    graphs = llm.llm_engine.executor.graphs
    sizes = [graphs.graph_for(decode_plan(count)) for count in range(1, 8)]
    assert [size and size.size.num_decodes for size in sizes] == [1, 2, 4, 4, 6, 6, None]


def test_without_prompt_sizes_prompts_use_no_graph(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=40)
    sequence = Sequence(0, [1, 2], SamplingParams())
    plan = StepPlan((Chunk(sequence, 0, 2, (1,), True),))
    assert llm.llm_engine.executor.graphs.graph_for(plan) is None


def test_mixed_sizes_are_few_and_reach_every_limit():
    sizes = graph_sizes(256, 8192, DEFAULT_PROMPT_SIZES)
    mixed = [size for size in sizes if size.num_prompts]
    assert len(mixed) == 36
    assert sizes[-1] == StepSize(255, 16, 1024)
    assert {size.num_decodes for size in mixed} == {0, 8, 32, 64, 128, 255}
    assert {size.num_prompt_tokens for size in mixed} == set(DEFAULT_PROMPT_SIZES)
    small = graph_sizes(2, 100, DEFAULT_PROMPT_SIZES)
    assert small[2:] == [
        StepSize(num_decodes, 2, num_tokens) for num_tokens in (64, 100) for num_decodes in (0, 1)
    ]
    assert graph_sizes(1, 512, (512,)) == [StepSize(1), StepSize(0, 1, 512)]
    assert graph_sizes(1, 512, ()) == [StepSize(1)]


def mixed_plan(num_decodes, lengths, **changes):
    """Return a step of decodes and of prompts with these lengths, in blocks of 16."""
    chunks = []
    for id, length in enumerate([1] * num_decodes + lengths):
        sequence, blocks = Sequence(id, [1] * length, SamplingParams()), (id,) * -(-length // 16)
        chunks.append(Chunk(sequence, 0, length, blocks, samples=True, **changes))
    return StepPlan(tuple(chunks))


@pytest.fixture(scope="module")
def default_graphs(tiny_model):
    """Graphs of the default sizes and 256 sequences, which compute nothing."""
    executor = LLM(tiny_model("llama"), dtype="fp32", num_kv_blocks=40).llm_engine.executor
    recorder = SimpleNamespace(record=lambda work: lambda: None)
    parts = executor.model, executor.cache, executor.backend
    return StepGraphs(
        *parts, recorder, graph_sizes(256, 8192, DEFAULT_PROMPT_SIZES), max_model_len=1024
    )


@pytest.mark.parametrize(
    ("num_decodes", "lengths", "size"),
    [
        (0, [2], (0, 64)),
        (0, [64], (0, 64)),
        (0, [65], (0, 128)),
        (1, [63], (8, 64)),
        (8, [30, 34], (8, 64)),
        (9, [30, 35], (32, 128)),
        (33, [129], (64, 256)),
        (65, [256], (128, 256)),
        (129, [257], (255, 512)),
        (255, [513], (255, 768)),
        (128, [769], (128, 1024)),
        (50, [1024], (64, 1024)),
        (0, [4] * 16, (0, 64)),
        (0, [4] * 17, None),
        (0, [1025], None),
        (256, [2], None),
        (1, [], (1, 0)),
        (3, [], (4, 0)),
        (50, [], (56, 0)),
        (256, [], (256, 0)),
        (257, [], None),
    ],
)
def test_sizes_of_mixed_steps(default_graphs, num_decodes, lengths, size):
    """size: decodes and prompt tokens of the graph, or None if the step runs without one."""
    graph = default_graphs.graph_for(mixed_plan(num_decodes, lengths))
    found = graph and (graph.size.num_decodes, graph.size.num_prompt_tokens)
    assert found == size


def test_steps_that_score_prompts_use_no_graph(default_graphs):
    assert default_graphs.graph_for(mixed_plan(0, [5])) is not None
    assert default_graphs.graph_for(mixed_plan(0, [5], scored=range(2))) is None


def random_plan(rng):
    """Return decodes, prompts and chunks of prompts in random order and scattered blocks of 4.

    Some continue after a prefix, and some do not sample.
    """
    blocks, lengths = rng.sample(range(60), 60), rng.choice([[1], [1, 1, 2, 5], [2, 3, 6]])
    chunks = []
    for id in range(rng.randint(1, 7)):
        length, start = rng.choice(lengths), rng.randrange(12)
        token_ids = [rng.randrange(1, 60) for _ in range(start + length)]
        sequence = Sequence(id, token_ids, SamplingParams(temperature=0))
        table = tuple(blocks.pop() for _ in range(-(-(start + length) // 4)))
        chunks.append(Chunk(sequence, start, length, table, samples=rng.random() < 0.8))
    return StepPlan(tuple(chunks))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "mixtral", "gpt_oss", "phi"])
def test_padded_steps_have_the_logits_of_unpadded_ones(tiny_model, architecture):
    """Bit for bit where the bits of a row do not depend on how many rows a product has.

    The same buffers serve all steps, so what one leaves behind must not change the next. Only the
    blocks that a step's own sequences hold contain numbers.
    """
    llm, _ = with_graphs(
        tiny_model(architecture), max_rows=6, prompt_sizes=(8, 16), num_kv_blocks=60
    )
    executor, rng, used = llm.llm_engine.executor, random.Random(1), set()
    cpu = Staging(torch.device("cpu"))
    unpadded, padded = InputBuilder(4, cpu), InputBuilder(4, cpu)
    is_exact = architecture in ("llama", "gpt2", "mistral") and cpu_linear.is_faster()
    for _ in range(60):
        plan = random_plan(rng)
        graph = executor.graphs.graph_for(plan)
        if graph is None:
            continue
        for cache in (*executor.cache.keys, *executor.cache.values):
            cache.fill_(float("nan"))
            for chunk in plan.chunks:
                cache[list(chunk.blocks)] = torch.randn(len(chunk.blocks), *cache.shape[1:])
        with torch.inference_mode():
            inputs = unpadded.build(plan)
            step = PagedStep(inputs.batch, executor.cache, executor.backend)
            expected = executor.model.forward(inputs, step).float()
            found = graph.replay(padded.build(plan, size=graph.size))
        used.add(graph.size)
        torch.testing.assert_close(found, expected, atol=0 if is_exact else 2e-5, rtol=0)
        others = set(range(60)).difference(*(chunk.blocks for chunk in plan.chunks))
        for cache in (*executor.cache.keys, *executor.cache.values):
            assert cache[list(others)].isnan().all(), "padding writes to no block"
    assert used == set(executor.graphs.sizes)


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
    """Besides the graph itself: its inputs are made and copied into the graph's buffers."""
    builder = InputBuilder(16, Staging(torch.device("cpu")))

    def operations(plan):
        graph = default_graphs.graph_for(plan)
        with torch.inference_mode(), OperationCount() as operations:
            graph.replay(builder.build(plan, size=graph.size))
        return operations.count

    largest = mixed_plan(200, [700, 3])
    operations(largest)  # makes room for its inputs
    counts = {operations(plan) for plan in (mixed_plan(2, [5]), mixed_plan(0, [64]), largest)}
    assert max(counts) <= MAX_OPERATIONS


class FakeGpu:
    """Replaces the parts of torch.cuda that a recorder uses. Kernels take time on a fake clock."""

    def __init__(self, monkeypatch):
        self.events, self.modes = [], ["default"]
        self.now = self.busy_until = 0.0
        for name, value in {
            "graph_pool_handle": lambda: "pool",
            "Stream": lambda: self,
            "current_stream": lambda: self,
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.events.append("replay")),
            "graph": self._capture,
            "get_sync_debug_mode": lambda: self.modes[-1],
            "set_sync_debug_mode": self.modes.append,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def wait_stream(self, other):
        pass

    def synchronize(self):
        self.now = max(self.now, self.busy_until)

    def launch(self, host_seconds, device_seconds):
        self.now += host_seconds
        self.busy_until = max(self.now, self.busy_until) + device_seconds

    @contextmanager
    def _capture(self, graph, pool, stream):
        self.events.append("capture")
        yield


def test_a_warm_up_that_waits_for_the_device_fails_before_the_capture(monkeypatch):
    """A failed capture leaves torch's memory pool open."""
    gpu = FakeGpu(monkeypatch)

    def waits():
        if gpu.modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="synchronizing"):
        recorder.record(waits)
    assert (gpu.events, gpu.modes[-1]) == ([], "default")
    recorder.record(lambda: gpu.events.append(gpu.modes[-1]))()
    assert gpu.events == ["error", "capture", "default", "replay"]


@pytest.mark.parametrize(("device_ms", "is_bound"), [(0.5, True), (1, True), (1.5, False)])
def test_a_step_is_launch_bound_if_its_kernels_run_as_fast_as_they_are_launched(
    monkeypatch, device_ms, is_bound
):
    gpu, num_runs = FakeGpu(monkeypatch), 0

    def work():
        nonlocal num_runs
        num_runs += 1
        for _ in range(20):
            gpu.launch(1.0 if num_runs > 1 else 50.0, device_ms)  # the first run compiles

    assert CudaRecorder(clock=lambda: gpu.now).is_launch_bound(work) == is_bound
    assert num_runs == 2


def graphs_with(tiny_model, recorder, **options):
    executor = LLM(tiny_model("llama"), dtype="fp32", num_kv_blocks=40).llm_engine.executor
    parts = executor.model, executor.cache, executor.backend
    return StepGraphs(*parts, recorder, graph_sizes(2, 16, (4, 8)), max_model_len=64, **options)


def mixed_sizes(graphs):
    return [(size.num_prompt_tokens, size.num_decodes) for size in graphs.sizes if size.num_prompts]


def test_only_mixed_steps_bound_by_launches_are_captured(tiny_model):
    """The largest is measured first. A step may be padded to a larger size than otherwise."""
    graphs = graphs_with(tiny_model, Imitation([False, True, False, True]), is_selective=True)
    assert mixed_sizes(graphs) == [(4, 0), (8, 0)]
    assert (graphs.num_device_bound, graphs.num_late, len(graphs)) == (2, 0, 4)
    assert graphs.graph_for(mixed_plan(1, [3])) is None
    graphs = graphs_with(tiny_model, Imitation([True, True, False, False]), is_selective=True)
    assert graphs.graph_for(mixed_plan(1, [3])).size == StepSize(1, 2, 8)
    unselective = graphs_with(tiny_model, Imitation([False] * 4))
    assert mixed_sizes(unselective) == [(4, 0), (4, 1), (8, 0), (8, 1)]


def test_capturing_mixed_steps_ends_when_time_is_up(tiny_model):
    """Steps without prompts are captured all the same; small mixed ones use a larger size."""
    recorder = Imitation()

    def clock():
        return recorder.num_recorded * (MAX_CAPTURE_SECONDS / 2 + 1)

    graphs = graphs_with(tiny_model, recorder, clock=clock)
    assert mixed_sizes(graphs) == [(8, 0), (8, 1)]
    assert (graphs.num_late, len(graphs)) == (2, 4)
    assert graphs.graph_for(mixed_plan(0, [3])).size == StepSize(0, 2, 8)
    assert graphs.graph_for(mixed_plan(2, [])).size == StepSize(2)


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

    StepGraphs(
        executor.model, executor.cache, executor.backend, Imitation(), graph_sizes(4, 16, (8,)),
        max_model_len=32, progress=progress,
    )  # fmt: skip
    sizes = [(size.num_prompt_tokens, size.num_decodes) for size in seen]
    assert sizes == [(8, 3), (8, 0), (0, 4), (0, 2), (0, 1)], "the largest first"


def test_aborts_and_preemption_change_no_other_answer(tiny_model):
    """With overlap and graphs; every third request is aborted half-way."""

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
