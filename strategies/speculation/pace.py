"""How much longer steps take in operation than when their costs were measured.

At the start, steps are timed one by one, without a strategy. In operation, the host's work for each
sequence and token comes on top. Where steps overlap, it is hidden, but not that of a step with
drafts: the next one is scheduled when the number of its tokens is known.

Single times of the start may be disturbed, so steps with few drafts and with many are corrected
apart. Else the number of drafts that seems best is one whose time was too short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.configuration.step_size import MAX_DRAFTS

WEIGHT = 0.1
"""That of the newest step in a mean."""
MOST = 1.5
"""What takes more times as long as such steps usually do counts as if it took so long: something
else has disturbed it, and steps of the other kind may never be timed again to compare with."""
FORGOTTEN = 0.0005
"""How much of what is known of steps with drafts is forgotten in a step without, so that they are
tried again after a disturbance."""
FORGOTTEN_MEANWHILE = 0.02
"""How much of what is known of other numbers of drafts is forgotten in a step with drafts."""
PASSES = -1
"""Stands for a draft model's passes, in place of a number of drafts."""
COMPARED = 0.3
"""The weight of a step that has no drafts only to be timed: there are few."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    num_decodes: int
    num_drafts: int
    cost: float
    """Seconds, as measured at the start."""
    begin: float
    """When it was begun to decide on its drafts. If it has none, when that was decided: where no
    step has any, nothing is."""
    is_ahead: bool
    """Whether it was scheduled while another step was in flight."""
    is_compared: bool = False
    """Whether it has no drafts only to be timed."""


class Pace:
    def __init__(self, clock: Callable[[], float] | None) -> None:
        """clock: None if all steps take what they cost."""
        self._clock = clock
        self._means: dict[int, dict[int, float]] = {}
        """By the bit lengths of the numbers of decodes and of drafts, and PASSES."""
        self._paces: dict[int, list[float]] = {}
        """What `of` returned last."""
        self._step: TimedStep | None = None
        """The step that is timed."""

    @property
    def is_timing(self) -> bool:
        return self._step is not None

    @property
    def is_measured(self) -> bool:
        return self._clock is not None

    @property
    def now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def of(self, num_decodes: int) -> Sequence[float]:
        """Return how many times as long as their costs steps take, without drafts and with them.

        By the bit length of the number of drafts, up to that of MAX_DRAFTS. As long as there was no
        such step, one with fewer drafts counts, then one with more, then one without.
        """
        key = num_decodes.bit_length()
        if key not in self._paces:
            means = self._means.get(key, {})
            paces = [means.get(0, 1.0)]
            pace = next((means[drafts] for drafts in sorted(means) if drafts > 0), paces[0])
            for drafts in range(1, MAX_DRAFTS.bit_length() + 1):
                pace = means.get(drafts, pace)
                paces.append(pace)
            self._paces[key] = paces
        return self._paces[key]

    def of_passes(self, num_decodes: int) -> float:
        """Return how many times as long as their costs a draft model's passes take.

        Before any were timed, it is as of steps without drafts.
        """
        means = self._means.get(num_decodes.bit_length(), {})
        return means.get(PASSES, self.of(num_decodes)[0])

    def count_passes(self, num_decodes: int, seconds: float, cost: float) -> None:
        """Count a draft model's passes that took so many seconds."""
        if self._clock is not None and cost > 0:
            usual = self.of_passes(num_decodes)
            ratio = min(MOST * usual, seconds / cost)
            means = self._means.setdefault(num_decodes.bit_length(), {})
            means[PASSES] = usual + WEIGHT * (ratio - usual)

    def begin(self, step: TimedStep) -> None:
        """Time a step until the next one is scheduled."""
        if self._clock is not None and step.cost > 0:
            self._step = step

    def end(self, *, is_ahead: bool) -> float | None:
        """Count the step that is timed. Return its seconds, or None if it cannot be counted.

        is_ahead: whether it is still in flight. If another one was not when it was scheduled, or
        only then, steps begin to overlap, or end to: what passed in between is not a step's time.
        """
        step, self._step = self._step, None
        if self._clock is None or step is None or step.is_ahead != is_ahead:
            return None
        seconds = self._clock() - step.begin
        of_step, key = step.num_drafts.bit_length(), step.num_decodes.bit_length()
        usual = self.of(step.num_decodes)[of_step]
        ratio = min(MOST * usual, seconds / step.cost)
        del self._paces[key]
        means = self._means.setdefault(key, {})
        weight = COMPARED if step.is_compared else WEIGHT
        means[of_step] = mean = usual + weight * (ratio - usual)
        # Where drafts pay, steps without are compared now and then.
        forgotten = FORGOTTEN_MEANWHILE if of_step else FORGOTTEN
        kept = {0, of_step, PASSES} if of_step else {0}
        for drafts in means.keys() - kept:
            means[drafts] += forgotten * (mean - means[drafts])
        return seconds

    def drop(self) -> None:
        """Time no step: nobody waits for the one that was scheduled, or it has other work."""
        self._step = None
