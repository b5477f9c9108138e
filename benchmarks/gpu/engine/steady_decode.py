"""Steady-state decoding: every step of the engine computes one token of each sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine.engines import make_engine
from core.sampling import SamplingParams
from engine.engine import Engine

PROMPT, OUTPUT = 1000, 384
"""Lengths in tokens. The output is long enough that no sequence finishes during a measurement."""
DRY_PROMPT, DRY_OUTPUT = 20, 80
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
MIN_GENERATED = 4
"""Tokens that every sequence has generated before measuring begins."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Means over consecutive decode steps."""

    seconds: float
    """Time from the arrival of one step's tokens to that of the next step's."""
    kv_tokens: float
    """Tokens whose K and V a step reads, over all sequences."""


def decoding_engine(bench: Bench, max_sequences: int) -> Engine:
    return make_engine(
        bench,
        batching="paged",
        max_rolling_batch_size=max_sequences,
        max_model_len=sum(lengths(bench)),
    )


def has_room_for(bench: Bench, engine: Engine, batch: int) -> bool:
    """Return whether the KV cache has room for `batch` sequences."""
    memory = engine.strategy.memory
    return memory.blocks_for([sum(lengths(bench))] * batch) <= memory.num_blocks


class SteadyDecode:
    """Context manager that keeps a batch of sequences decoding.

    Tokens count when the engine returns them, so it does not matter whether `step` returns the
    tokens of its own forward pass or of the previous one.
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
        self._prompt_length, self._output_length = lengths(bench)
        self._batch = batch
        self._generated: dict[int, int] = {}

    def __enter__(self) -> Self:
        params = SamplingParams(temperature=0, max_tokens=self._output_length, ignore_eos=True)
        vocab_size = self._engine.facts.vocab_size
        for row in range(self._batch):
            prompt = [(7919 * row + 31 * i) % vocab_size for i in range(self._prompt_length)]
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
        while self._engine.has_work():  # a step may still be in flight
            self._engine.step(self._clock())

    def run(self, num_steps: int, prompt_tokens: int = 0) -> Steps:
        """Run `num_steps` decode steps. Raises RuntimeError if a sequence of the batch finishes.

        prompt_tokens: a new prompt of this length joins each step. Its answer is one token.
        """
        begin, num_before = self._clock(), sum(self._generated.values())
        num_after = num_before + num_steps * self._batch
        while sum(self._generated.values()) < num_after:
            if prompt_tokens:
                self._engine.add([1] * prompt_tokens, ONE_TOKEN, self._clock())
            self._step()
        seconds = (self._clock() - begin) / num_steps
        # The step after the nth generated token reads that token, all earlier ones and the prompt.
        first = num_before + self._batch * self._prompt_length
        return Steps(seconds, first + self._batch * (num_steps - 1) / 2)

    def _step(self) -> None:
        for output in self._engine.step(self._clock()):
            if output.request_id not in self._generated:
                continue  # a prompt that joined one step
            if output.finish is not None:
                raise RuntimeError(f"a sequence finished: {output.finish} {output.failure}")
            self._generated[output.request_id] += len(output.token_ids)


def lengths(bench: Bench) -> tuple[int, int]:
    """Return the tokens of a prompt and of its answer."""
    return (DRY_PROMPT, DRY_OUTPUT) if bench.is_dry else (PROMPT, OUTPUT)
