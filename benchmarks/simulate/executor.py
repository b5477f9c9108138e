"""Replacements of the engine's executors that only compute how long a step would take."""

from __future__ import annotations

from typing import Protocol

from benchmarks.simulate.cost import Hardware, num_pairs
from benchmarks.simulate.traffic import token_of
from core.plan import StepPlan, StepResult
from core.sampling import Sampled
from core.sequence import Sequence


class Executor(Protocol):
    """Executes a step plan on the simulated clock."""

    def run(self, plan: StepPlan) -> tuple[float, StepResult]:
        """Return the seconds of the step and the tokens it samples."""
        ...


class SimulatedPackedExecutor:
    """Computes a step without padding; each chunk that samples yields one token."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def run(self, plan: StepPlan) -> tuple[float, StepResult]:
        chunks = plan.chunks
        seconds = self._hardware.step_s(
            sum(chunk.length for chunk in chunks),
            sum(num_pairs(chunk.start, chunk.length) for chunk in chunks),
            sum(chunk.end for chunk in chunks),
        )
        return seconds, {
            chunk.sequence.id: tokens(chunk.sequence, 1) for chunk in chunks if chunk.samples_token
        }


class SimulatedPaddedExecutor:
    """Runs a whole static batch as one step, padded to the longest prompt and longest output.

    Models FasterTransformer behind Triton Inference Server's dynamic batching, and our own library
    executor: every sequence takes part in every forward pass, and all finish together.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def run(self, plan: StepPlan) -> tuple[float, StepResult]:
        chunks = plan.chunks
        assert all(chunk.samples_token and chunk.start == 0 for chunk in chunks), (
            "not whole prompts"
        )
        count = len(chunks)
        prompt = max(chunk.length for chunk in chunks)
        output = max(chunk.sequence.params.max_tokens for chunk in chunks)
        seconds = self._hardware.step_s(
            count * prompt, count * num_pairs(0, prompt), count * prompt
        )
        for length in range(prompt + 1, prompt + output):
            seconds += self._hardware.decode_s(count, count * length)
        sequences = [chunk.sequence for chunk in chunks]
        return seconds, {
            sequence.id: tokens(sequence, sequence.params.max_tokens) for sequence in sequences
        }


def tokens(sequence: Sequence, count: int) -> Sampled:
    """Return the next `count` output tokens of a sequence. No other sequence has these tokens."""
    return Sampled((token_of(sequence.id),) * count, (0.0,) * count)
