"""An engine in the middle of decoding: every step computes one token of each sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.bench import Bench
from benchmarks.engines import make_engine
from core.sampling import SamplingParams
from engine.engine import Engine

PROMPT, ANSWER = 1000, 384
"""Tokens. Answers are long enough that none ends while the others are measured."""
DRY_PROMPT, DRY_ANSWER = 20, 80
MIN_GENERATED = 4
"""Tokens that every sequence has when measuring begins."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Of a few steps in a row."""

    seconds: float
    """Of one, from the arrival of its tokens to that of the next one's."""
    kv_tokens: float
    """Tokens whose K and V one step reads, over all sequences."""


def decoding_engine(bench: Bench, most_sequences: int) -> Engine:
    return make_engine(
        bench,
        batching="paged",
        max_rolling_batch_size=most_sequences,
        max_model_len=sum(_lengths(bench)),
    )


def has_room_for(bench: Bench, engine: Engine, batch: int) -> bool:
    """Whether so many sequences run at once."""
    memory = engine.strategy.memory
    return batch * memory.blocks_for(sum(_lengths(bench))) <= memory.num_blocks


class SteadyDecode:
    """A batch of sequences, from the end of their prompts until the block ends.

    Takes what the engine hands out when it comes, so it does not matter whether `step` returns
    the tokens of its own forward or of the one before.
    """

    def __init__(
        self,
        bench: Bench,
        engine: Engine,
        batch: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._num_prompt, self._num_answer = _lengths(bench)
        self._batch = batch
        self._generated: dict[int, int] = {}

    def __enter__(self) -> Self:
        params = SamplingParams(temperature=0, max_tokens=self._num_answer, ignore_eos=True)
        vocab_size = self._engine.facts.vocab_size
        for row in range(self._batch):
            prompt = [(7919 * row + 31 * place) % vocab_size for place in range(self._num_prompt)]
            self._generated[self._engine.add(prompt, params, self._clock())] = 0
        while min(self._generated.values()) < MIN_GENERATED:
            self._step()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for sequence_id in self._generated:
            self._engine.abort(sequence_id)
        while self._engine.has_work():  # a step may still be under way
            self._engine.step(self._clock())

    def run(self, num_steps: int) -> Steps:
        begin, num_before = self._clock(), sum(self._generated.values())
        num_after = num_before + num_steps * self._batch
        while sum(self._generated.values()) < num_after:
            self._step()
        seconds = (self._clock() - begin) / num_steps
        # The step after the nth generated token reads it, all before it and the prompt.
        first = num_before + self._batch * self._num_prompt
        return Steps(seconds, first + self._batch * (num_steps - 1) / 2)

    def _step(self) -> None:
        for output in self._engine.step(self._clock()):
            if output.finish is not None:
                raise RuntimeError(f"a sequence ended: {output.finish} {output.failure}")
            self._generated[output.request_id] += len(output.token_ids)


def _lengths(bench: Bench) -> tuple[int, int]:
    return (DRY_PROMPT, DRY_ANSWER) if bench.is_dry else (PROMPT, ANSWER)
