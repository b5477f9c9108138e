"""CUDA graphs whose capture is imitated on the CPU, and plans of steps that use them."""

from __future__ import annotations

from types import SimpleNamespace

from core.configuration.step_size import DEFAULT_PROMPT_SIZES, graph_sizes
from core.plan import BlockTable, Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine import LLM
from engine.step.step_graphs import StepGraphs


class Imitation:
    """A recorder whose replays poison the logits and then call the recorded function again."""

    def __init__(self, bound=()):
        """bound: the first answers of `is_launch_bound`. All later answers are True."""
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
    return llm, add_graphs(llm, max_rows=max_rows, prompt_sizes=prompt_sizes)


def add_graphs(llm, *, max_rows=4, prompt_sizes=(), num_drafts=0):
    """Let an LLM's steps of up to `max_rows` sequences be graphs. Return their recorder."""
    executor, recorder = llm.llm_engine.executor, Imitation()
    passes = executor.passes
    sizes = graph_sizes(max_rows, llm.facts.max_step_tokens, prompt_sizes, num_drafts)
    passes.graphs = StepGraphs(
        passes.model,
        passes.cache,
        passes.backend,
        recorder,
        sizes,
        max_model_len=llm.facts.max_model_len,
    )
    return recorder


def of_default_sizes(path):
    """Return graphs of the default sizes, for up to 256 sequences, that compute nothing."""
    passes = LLM(path, dtype="fp32", num_kv_blocks=40).llm_engine.executor.passes
    recorder = SimpleNamespace(record=lambda work: lambda: None)
    parts = passes.model, passes.cache, passes.backend
    return StepGraphs(
        *parts, recorder, graph_sizes(256, 8192, DEFAULT_PROMPT_SIZES), max_model_len=1024
    )


def decode_plan(count, num_tokens=5):
    """Return a step of `count` sequences with two blocks each, from block 1 on."""
    return StepPlan(
        tuple(
            Chunk(
                Sequence(id, [1 + id] * num_tokens, SamplingParams(temperature=0)),
                num_tokens - 1,
                1,
                (BlockTable((1 + 2 * id, 2 + 2 * id)),),
                samples_token=True,
            )
            for id in range(count)
        )
    )


def mixed_plan(num_decodes, lengths, **changes):
    """Return a step of decodes and of prompts with these lengths, in blocks of 16."""
    chunks = []
    for id, length in enumerate([1] * num_decodes + lengths):
        sequence = Sequence(id, [1] * length, SamplingParams())
        table = BlockTable((id,) * -(-length // 16))
        chunks.append(Chunk(sequence, 0, length, (table,), samples_token=True, **changes))
    return StepPlan(tuple(chunks))
