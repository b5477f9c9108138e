"""What takes the place of the engine's executors: it knows how long a step takes, and no more."""

from __future__ import annotations

from typing import Protocol

from benchmarks.simulate.cost import Hardware, num_pairs
from benchmarks.simulate.traffic import token_of
from core.plan import StepPlan, StepResult
from core.sampling import Sampled
from core.sequence import Sequence


class Executor(Protocol):
    def run(self, plan: StepPlan) -> tuple[float, StepResult]:
        """Seconds of the step, and what it samples."""
        ...


class PackedExecutor:
    """A step computes its tokens, without padding, and each sequence at its end gets one more."""

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
            each.sequence.id: tokens(each.sequence, 1) for each in chunks if each.samples
        }


class PaddedExecutor:
    """A gang as one run: padded to the longest prompt, over when the longest answer is.

    As FasterTransformer behind Triton's dynamic batching, and our own library executor: every
    member takes part in every step, and all have their answers at the end.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def run(self, plan: StepPlan) -> tuple[float, StepResult]:
        assert all(each.samples and each.start == 0 for each in plan.chunks), "not a whole gang"
        count = len(plan.chunks)
        prompt = max(each.length for each in plan.chunks)
        answer = max(each.sequence.params.max_tokens for each in plan.chunks)
        seconds = self._hardware.step_s(
            count * prompt, count * num_pairs(0, prompt), count * prompt
        )
        for length in range(prompt + 1, prompt + answer):
            seconds += self._hardware.decode_s(count, count * length)
        sequences = [each.sequence for each in plan.chunks]
        return seconds, {each.id: tokens(each, each.params.max_tokens) for each in sequences}


def tokens(sequence: Sequence, count: int) -> Sampled:
    """The next `count` of an answer, unlike those of any other."""
    return Sampled((token_of(sequence.id),) * count, (0.0,) * count)
