"""The packed executor: runs a decoder over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from core.plan import Chunk, StepPlan, StepResult
from core.sampling import ChunkResult
from engine.executor import FinishedStep, SubmittedStep
from engine.sampling.rows import Row
from engine.sampling.sampler import Choices, Sampler
from engine.staging import Staging
from engine.step.column import Applied, Column
from engine.step.passes import Passes, Runner
from engine.step.step_inputs import InFlight, InputBuilder, StepInputs


class PackedExecutor:
    """Runs any mix of prefills, chunked prefills and decodes as one row of tokens.

    Only CUDA graphs need padding.

    `submit` does not wait for the device. Inputs and sampled tokens are copied asynchronously, and
    the next step reads the tokens that it needs from the device's memory.
    """

    def __init__(
        self,
        passes: Passes,
        sampler: Sampler,
        columns: Sequence[Column] = (),
        runner: Runner | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        """columns: a result that several of them change is as the last of them leaves it.

        runner: runs block moves and forward passes in the place of `passes`. overlaps: as in
        `Engine`, so chunks may end with a token in flight.
        """
        device = passes.model.device
        self.passes = passes
        self.model_time = passes.model_time
        self._runner = runner or passes
        self._columns = columns
        self._columns_without_parts = [column for column in columns if not column.needs_part]
        self._inputs = InputBuilder(passes.cache.groups, Staging(device))
        self._sampler = sampler
        self._in_flight = InFlight(device) if overlaps else None

    @torch.inference_mode()
    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> SubmittedStep:
        """Start a step: one forward pass, or several if a column splits it."""
        self._runner.move(plan.moves)
        if not plan.chunks:
            return FinishedStep({})
        has_parts = any(chunk.sequence.parts for chunk in plan.chunks)
        columns = self._columns if has_parts else self._columns_without_parts
        plans = [plan]
        for column in columns:
            plans = [part for whole in plans for part in column.split(whole)]
        parts = [self._run_forward(part, columns) for part in plans]
        if self._in_flight is not None:
            self._in_flight.keep(
                [(part.sampled_chunks, part.choices.token_ids) for part in parts if part.choices]
            )
        return _PackedStep(parts, self.passes.during_wait)

    def _run_forward(self, plan: StepPlan, columns: Sequence[Column]) -> _Part:
        """Run one forward pass, as a CUDA graph if there is one for it, and sample.

        columns: those that the step may use.
        """
        columns = [column for column in columns if column.is_used(plan.chunks)]
        size = self.passes.size_for(plan.chunks, columns)
        inputs = self._inputs.build(plan, size=size, columns=columns, in_flight=self._in_flight)
        logits = self._runner.forward(inputs, size)
        num_sampled = len(inputs.sampled_chunks)
        if inputs.columns:
            _give(logits, num_sampled, inputs.columns)
        if not num_sampled:
            return _Part((), None, inputs.columns)
        return self._sample(logits[:num_sampled], inputs)

    def _sample(self, logits: Tensor, inputs: StepInputs) -> _Part:
        rows = [Row(chunk.sequence, chunk.num_tokens) for chunk in inputs.sampled_chunks]
        choices = self._sampler.sample(logits, rows, inputs.newest)
        return _Part(inputs.sampled_chunks, choices, inputs.columns)


def _give(logits: Tensor, num_sampled: int, columns: Sequence[Applied]) -> None:
    """Give each column its rows of the logits [S + R, vocabulary]."""
    start = num_sampled
    for column in columns:
        end = start + (0 if column.extra_rows is None else len(column.extra_rows))
        column.take(logits[:num_sampled], logits[start:end])
        start = end


@dataclass(frozen=True, slots=True)
class _Part:
    """The results of one forward pass of a step, on their way to the host."""

    sampled_chunks: tuple[Chunk, ...]
    """The S chunks for which a token was sampled."""
    choices: Choices | None
    columns: Sequence[Applied]


@dataclass(frozen=True, slots=True)
class _PackedStep:
    parts: list[_Part]
    during_wait: AbstractContextManager[None]

    def wait(self) -> StepResult:
        with self.during_wait:
            return self._results()

    def _results(self) -> StepResult:
        results: dict[int, ChunkResult] = {}
        for part in self.parts:
            if part.choices is not None:
                ids = [chunk.sequence.id for chunk in part.sampled_chunks]
                results |= zip(ids, part.choices.wait(), strict=True)
        for part in self.parts:
            for column in part.columns:
                column.add_to(results)
        return results
