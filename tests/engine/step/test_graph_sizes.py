"""Which sizes of steps are captured, and which of them a step uses."""

from __future__ import annotations

import pytest
import torch

from core.configuration.step_size import (
    DEFAULT_PROMPT_SIZES,
    MAX_DRAFTS,
    StepSize,
    decode_sizes,
    graph_sizes,
)
from core.plan import BlockTable, Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine import LLM
from engine.scores.column import ScoreColumn
from engine.step.step_graphs import MAX_CAPTURE_SECONDS, StepGraphs
from tests.engine.step.graphs import (
    Imitation,
    decode_plan,
    mixed_plan,
    with_graphs,
)


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


def test_a_step_uses_the_smallest_graph_that_fits(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), max_rows=6, num_kv_blocks=40)
    graphs = llm.llm_engine.executor.passes.graphs
    sizes = [graphs.size_for(decode_plan(count).chunks) for count in range(1, 8)]
    assert [size and size.num_decodes for size in sizes] == [1, 2, 4, 4, 6, 6, None]


def test_without_prompt_sizes_prompts_use_no_graph(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=40)
    sequence = Sequence(0, [1, 2], SamplingParams())
    plan = StepPlan((Chunk(sequence, 0, 2, (BlockTable((1,)),), True),))
    assert llm.llm_engine.executor.passes.graphs.size_for(plan.chunks) is None


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


def test_sizes_of_steps_with_drafts_have_rows_for_all_of_them():
    decodes, mixed = (
        [StepSize(1), StepSize(2), StepSize(4)],
        [StepSize(0, 4, 64), StepSize(3, 4, 64)],
    )
    drafting = [
        StepSize(num_decodes, num_drafting, 4 * count, 3 * count)
        for count, num_drafting in ((1, 2), (2, 4), (4, 4))
        for num_decodes in (0, 3)
    ]
    assert graph_sizes(4, 512, (64,), 3) == decodes + drafting + mixed
    for size in drafting:
        longest, shortest = [4] * (size.num_prompt_tokens // 4), [2] * size.num_prompts
        for lengths in (longest, shortest):
            drafts = sum(lengths) - len(lengths)
            assert size.fits(StepSize(size.num_decodes, len(lengths), sum(lengths), drafts))
    assert graph_sizes(4, 5, (), 3) == decodes + drafting[:2], "a step has 5 tokens at most"
    for num_drafts in (5, 16):
        largest = max(graph_sizes(256, 8192, (), num_drafts), key=lambda size: size.num_tokens)
        assert largest == StepSize(64, 64, 64 + MAX_DRAFTS, MAX_DRAFTS)


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
    found = default_graphs.size_for(mixed_plan(num_decodes, lengths).chunks)
    assert (found and (found.num_decodes, found.num_prompt_tokens)) == size


def test_steps_that_score_prompts_use_no_graph(default_graphs):
    assert default_graphs.size_for(mixed_plan(0, [5]).chunks) is not None
    scored = mixed_plan(0, [5], extra_rows=range(2)).chunks
    assert default_graphs.size_for(scored, [ScoreColumn(torch.device("cpu"))]) is None


def graphs_with(tiny_model, recorder, **options):
    passes = LLM(tiny_model("llama"), dtype="fp32", num_kv_blocks=40).llm_engine.executor.passes
    parts = passes.model, passes.cache, passes.backend
    return StepGraphs(*parts, recorder, graph_sizes(2, 16, (4, 8)), max_model_len=64, **options)


def mixed_sizes(graphs):
    return [(size.num_prompt_tokens, size.num_decodes) for size in graphs.sizes if size.num_prompts]


def test_mixed_steps_are_captured_only_if_they_are_launch_bound(tiny_model):
    """The largest size is measured first.

    A step may be padded to a larger size if its own has no graph.
    """
    graphs = graphs_with(tiny_model, Imitation([False, True, False, True]), skips_device_bound=True)
    assert mixed_sizes(graphs) == [(4, 0), (8, 0)]
    assert (graphs.num_device_bound, graphs.num_timed_out, len(graphs)) == (2, 0, 4)
    assert graphs.size_for(mixed_plan(1, [3]).chunks) is None
    graphs = graphs_with(tiny_model, Imitation([True, True, False, False]), skips_device_bound=True)
    assert graphs.size_for(mixed_plan(1, [3]).chunks) == StepSize(1, 2, 8)
    unselective = graphs_with(tiny_model, Imitation([False] * 4))
    assert mixed_sizes(unselective) == [(4, 0), (4, 1), (8, 0), (8, 1)]


def test_capturing_mixed_steps_ends_when_time_is_up(tiny_model):
    """Steps without prompts are captured all the same; small mixed ones use a larger size."""
    recorder = Imitation()

    def clock():
        return recorder.num_recorded * (MAX_CAPTURE_SECONDS / 2 + 1)

    graphs = graphs_with(tiny_model, recorder, clock=clock)
    assert mixed_sizes(graphs) == [(8, 0), (8, 1)]
    assert (graphs.num_timed_out, len(graphs)) == (2, 4)
    assert graphs.size_for(mixed_plan(0, [3]).chunks) == StepSize(0, 2, 8)
    assert graphs.size_for(mixed_plan(2, []).chunks) == StepSize(2)


def test_progress_covers_every_capture(tiny_model):
    llm, _ = with_graphs(tiny_model("llama"), num_kv_blocks=12)
    passes, seen = llm.llm_engine.executor.passes, []

    def progress(sizes):
        for size in sizes:
            yield size
            seen.append(size)

    StepGraphs(
        passes.model, passes.cache, passes.backend, Imitation(), graph_sizes(4, 16, (8,)),
        max_model_len=32, progress=progress,
    )  # fmt: skip
    sizes = [(size.num_prompt_tokens, size.num_decodes) for size in seen]
    assert sizes == [(8, 3), (8, 0), (0, 4), (0, 2), (0, 1)], "the largest first"
