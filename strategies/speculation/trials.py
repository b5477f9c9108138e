"""The time for trials: steps with drafts that are not expected to pay, to learn whether they do.

Nothing is learned of drafts that are never verified. So where none is expected to pay, those that
would pay most if all were right are tried now and then. As in conservative bandits (Wu, Shariff,
Lattimore and Szepesvári, 2016, arXiv:1602.04282), trials may lose no more than a share of what the
steps without drafts take. What right drafts save is given back, so a trial that pays is followed by
the next one at once, also when the text has changed. What a trial should take is spent, then what
it took counts: with caches that are cold, up to three times as much.

Where drafts are expected to pay, steps without them are the trials (`Comparisons`).
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.005
"""The part of the time that trials may lose."""
FIRST = 10.0
"""How many plain steps' time they may lose before that: drafts at the start are soon judged."""
MOST = 20.0
"""How many plain steps' time is saved up for a trial."""
IN_A_ROW = 4.0
"""How many plain steps' time trials may lose one after the other, before it is saved up anew.
Drafts that nearly pay give back most of what they take: they would be tried in hundreds of steps,
in which nothing more is learned of them."""
COMPARISONS = 1.0
"""How many plain steps' time comparisons may lose at first. As much is saved up, or one's cost."""


@dataclass(slots=True)
class Account:
    """What trials may still lose, in plain steps' time."""

    left: float = FIRST
    _highest: float = FIRST
    """The most that was ever left."""
    _wanted: float = 0.0
    """What the last trial would have cost, for which not enough was left."""

    def earn(self, num_steps: int) -> bool:
        """Count steps. Return whether to look for a trial in the last of them."""
        self._add(num_steps * SHARE)
        return self.left >= max(min(self._wanted, MOST), self._highest - IN_A_ROW)

    @property
    def is_full(self) -> bool:
        return self.left >= MOST

    def spend(self, num_steps: float) -> bool:
        """Return whether a trial may lose so much, and take it if so."""
        if num_steps > self.left:
            self._wanted = num_steps
            return False
        self.left -= num_steps
        self._wanted = 0.0
        return True

    def give_back(self, num_steps: float) -> None:
        """Count what right drafts of a trial have saved."""
        self._add(num_steps)

    def correct(self, num_steps: float) -> None:
        """Count what a trial has lost beyond what was spent; below 0, what was not."""
        self.left = min(MOST, max(-MOST, self.left - num_steps))

    def _add(self, num_steps: float) -> None:
        self.left = min(self.left + num_steps, MOST)
        self._highest = max(self._highest, self.left)


@dataclass(slots=True)
class Comparisons:
    """Steps without drafts though these seem to pay, to learn what such a step takes.

    Where all steps have drafts, it would never be known better than at the start. The less drafts
    gain, the less a step without loses, the more often there is one, and the more it matters.
    """

    left: float = COMPARISONS
    """What they may still lose, in plain steps' time."""
    _is_second: bool = False

    def is_due(self, gain: float, *, overlap: bool) -> bool:
        """Count a step. Return whether it is to have no drafts.

        gain: how many times as many tokens per second it would give with drafts. overlap: whether
        steps without drafts do. Then only the second of two can be timed.
        """
        lost = (gain - 1) * (1 + overlap)
        self.left = min(self.left + SHARE, max(COMPARISONS, lost))
        if self._is_second:
            self._is_second = False
            return True
        if lost > self.left:
            return False
        self.left -= lost
        self._is_second = overlap
        return True
