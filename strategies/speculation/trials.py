"""The time for trials: steps with drafts that are not expected to pay, to learn whether they do.

Nothing is learned of drafts that are never verified. So where none is expected to pay, those that
would pay most if all were right are tried now and then. As in conservative bandits (Wu, Shariff,
Lattimore and Szepesvári, 2016, arXiv:1602.04282), trials may lose no more than a share of what the
steps without drafts take. What right drafts save is given back, so a trial that pays is followed by
the next one at once, also when the text has changed. It counts by the measured costs, not by a
clock or by chance: the same steps give the same trials.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.005
"""The part of the time that trials may lose."""
FIRST = 10.0
"""How many plain steps' time they may lose before that: drafts at the start are soon judged."""
MOST = 20.0
"""How many plain steps' time is saved up for a trial."""


@dataclass(slots=True)
class Account:
    """Seconds that trials may still lose."""

    left: float | None = None
    """None before the first step."""
    _most: float = 0.0
    _wanted: float = 0.0
    """What the last trial would have cost, for which not enough was left."""

    def earn(self, seconds: float) -> bool:
        """Count a step that takes so long without drafts. Return whether to look for a trial."""
        self._most = MOST * seconds
        if self.left is None:
            self.left = FIRST * seconds
        self._add(SHARE * seconds)
        return self.left >= min(self._wanted, self._most)

    @property
    def is_full(self) -> bool:
        return self.left is not None and self.left >= self._most

    def spend(self, seconds: float) -> bool:
        """Return whether a trial may lose so much, and take it if so."""
        if self.left is None or seconds > self.left:
            self._wanted = seconds
            return False
        self.left -= seconds
        self._wanted = 0.0
        return True

    def give_back(self, seconds: float) -> None:
        """Count what right drafts of a trial have saved."""
        if self.left is not None:
            self._add(seconds)

    def _add(self, seconds: float) -> None:
        assert self.left is not None, "the first step was counted"
        # A step of fewer sequences takes less time, and takes nothing away.
        self.left = max(self.left, min(self.left + seconds, self._most))
