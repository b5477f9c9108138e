"""Swapping blocks to the host and back gives the tokens of a run without preemption."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core.configuration.kv_layout import KVLayout, LayerShape
from core.plan import BlockMoves
from engine import LLM, SamplingParams
from engine.attention.backends import TorchBackend
from engine.attention.kv_cache import KVCache
from engine.step.block_mover import BlockMover, CopyStream
from tests.engine.greedy_answers import prompts, tokens

SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}


@pytest.mark.matrix
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("mode", ["swap", "auto"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_tokens_equal_those_of_generate(tiny_model, expected, architecture, mode, overlaps):
    llm = LLM(
        tiny_model(architecture),
        num_kv_blocks=14,
        preemption_mode=mode,
        async_scheduling=overlaps,
        **SMALL,
    )
    assert tokens(llm) == expected(architecture)
    assert llm.llm_engine.strategy.num_swaps > 0
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_samples_that_share_blocks_are_swapped_together(tiny_model, overlaps):
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, n=3, ignore_eos=True)
    answers = []
    for options in ({"batching": "none", "num_kv_blocks": 40},
                    {"num_kv_blocks": 20, "preemption_mode": "swap"}):  # fmt: skip
        llm = LLM(tiny_model("llama"), async_scheduling=overlaps, **options, **SMALL)
        requests = llm.generate(prompts(), params, use_tqdm=False)
        answers.append([[output.token_ids for output in request.outputs] for request in requests])
    assert answers[0] == answers[1]
    assert llm.llm_engine.strategy.num_swaps > 0


def test_the_host_pool_has_the_requested_size(tiny_model):
    block_bytes = 4 * 3 * 2 * 2 * 8 * 4
    for options, num_blocks in (
        ({"swap_space_gib": 10 * block_bytes / 2**30}, 10),
        ({"swap_space_gib": 0}, 0),
        ({"preemption_mode": "recompute"}, 0),
        ({"batching": "continuous"}, 0),
    ):
        llm = LLM(tiny_model("llama"), num_kv_blocks=40, **options, **SMALL)
        assert llm.facts.num_swap_blocks == num_blocks
        assert len(llm.llm_engine.executor.passes.cache.host) == num_blocks


def test_moves_run_in_order_and_in_batches():
    """A step may swap blocks out, swap others into their places, and copy these.

    Forty blocks were swapped out before.
    """
    cache = KVCache(
        [LayerShape(1, 8, 4)] * 2, 50, KVLayout.uniform(4), torch.float32, torch.device("cpu"), 60
    )
    for number, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(torch.arange(50)[:, None, None, None] + 100 * number)
    mover = BlockMover(cache, TorchBackend())
    mover.launch(BlockMoves(swap_outs=tuple((block, block + 20) for block in range(40))))
    mover.launch(
        BlockMoves(
            swap_outs=((45, 0), (7, 1)),
            swap_ins=((29, 45), (0, 7)),
            copies=((45, 46), (7, 47)),
        )
    )
    for number, tensor in enumerate((*cache.keys, *cache.values)):
        kept = tensor[:, 0, 0, 0] - 100 * number
        assert kept[[45, 46]].tolist() == [9, 9]
        assert kept[[7, 47]].tolist() == [45, 45], "swap-outs before swap-ins before copies"
        assert (tensor == tensor[:, :1, :1, :1]).all()
    mover.launch(BlockMoves(swap_ins=tuple((block + 20, 39 - block) for block in range(40))))
    kept = cache.keys[1][:, 0, 0, 0] - 100
    assert kept[:40].tolist() == list(range(39, -1, -1))


class FakeStream:
    """A CUDA stream that notes what it waits for. It is the current stream while it is entered."""

    def __init__(self, name, events, current):
        self.name, self.events, self.current = name, events, current

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.current.append(self)

    def __exit__(self, *_):
        self.current.pop()


def test_copies_to_the_host_run_beside_kernels_and_nothing_overtakes_them(monkeypatch):
    events, current = [], []
    current.append(FakeStream("kernels", events, current))
    copies = FakeStream("copies", events, current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    copy = torch.Tensor.copy_
    cache = KVCache(
        [LayerShape(1, 8, 4)], 50, KVLayout.uniform(4), torch.float32, torch.device("cpu"), 60
    )
    mover = BlockMover(cache, TorchBackend())
    mover._to_host = CopyStream(torch.device("cuda"))

    def watch(target, source, **options):
        events.append(f"copy on {current[-1].name}")
        return copy(target, source, **options)

    def gather(*args):
        events.append(f"gather on {current[-1].name}")

    def scatter(*args):
        events.append(f"scatter on {current[-1].name}")

    monkeypatch.setattr(torch.Tensor, "copy_", watch)
    kernels = SimpleNamespace(gather=gather, scatter=scatter)
    monkeypatch.setattr(mover, "_kernels", kernels)
    blocks = torch.zeros(17, dtype=torch.int64)
    mover._swap_out(blocks, list(range(17)))
    out = ["kernels waits for copies", "gather on kernels", "copies waits for kernels"]
    assert events == [*out, *["copy on copies"] * 16, *out, "copy on copies"]
    events.clear()
    mover._swap_in([3], blocks[:1])
    assert events == ["kernels waits for copies", "copy on kernels", "scatter on kernels"]
    events.clear()
    mover._swap_in([], blocks[:0])
    assert not events
