"""How much longer steps take in operation than when their costs were measured.

At the start, steps are timed one by one, without a strategy. In operation, the host's work for each
sequence and token comes on top. Where steps overlap, it is hidden, but not that of a step with
drafts: the next one is scheduled when the number of its tokens is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WEIGHT = 0.1
"""That of the newest step in a mean."""
MOST = 1.5
"""What takes more times as long as such steps usually do counts as if it took so long: something
else has disturbed it, and steps of the other kind may never be timed again to compare with."""
FORGOTTEN = 0.0005
"""How much of what is known of steps with drafts is forgotten in a step without, so that they are
tried again after a disturbance."""


@dataclass(frozen=True, slots=True)
class _Step:
    num_decodes: int
    has_drafts: bool
    cost: float
    is_ahead: bool
    begin: float


class Pace:
    def __init__(self, clock: Callable[[], float] | None) -> None:
        """clock: None if all steps take what they cost."""
        self._clock = clock
        self._means: dict[tuple[int, bool], float] = {}
        """Powers of two tell numbers of decodes apart."""
        self._step: _Step | None = None
        """The step that is timed."""

    @property
    def now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def of(self, num_decodes: int, *, has_drafts: bool) -> float:
        """Return how many times as long as their costs such steps take."""
        return self._means.get((num_decodes.bit_length(), has_drafts), 1.0)

    def begin(
        self, num_decodes: int, at: float, *, has_drafts: bool, cost: float, is_ahead: bool
    ) -> None:
        """Time a step until the next one is scheduled.

        at: when it was begun to schedule it. What it took to decide on its drafts counts: nothing
        hides it, as those before it were waited for. is_ahead: whether another step is in flight.
        """
        if self._clock is not None and cost > 0:
            self._step = _Step(num_decodes, has_drafts, cost, is_ahead, at)

    def end(self, *, is_ahead: bool) -> None:
        """Count the step that is timed, if any. is_ahead: whether it is still in flight.

        If it was not so when that one was scheduled, or only then, steps begin to overlap, or end
        to: what passed in between is not the time of a step.
        """
        step, self._step = self._step, None
        if self._clock is None or step is None or step.is_ahead != is_ahead:
            return
        usual = self.of(step.num_decodes, has_drafts=step.has_drafts)
        ratio = min(MOST * usual, (self._clock() - step.begin) / step.cost)
        self._move(step.num_decodes, step.has_drafts, ratio, WEIGHT)
        if not step.has_drafts:
            plain = self.of(step.num_decodes, has_drafts=False)
            self._move(step.num_decodes, True, plain, FORGOTTEN)

    def drop(self) -> None:
        """Time no step: nobody waits for the one that was scheduled, or it has other work."""
        self._step = None

    def _move(self, num_decodes: int, has_drafts: bool, to: float, weight: float) -> None:
        mean = self.of(num_decodes, has_drafts=has_drafts)
        self._means[num_decodes.bit_length(), has_drafts] = mean + weight * (to - mean)
