"""What is known of one sequence that may have drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

from strategies.speculation.policy import History
from strategies.speculation.proposer import Lookup

LONGEST_REST = 8
"""The most steps for which a sequence without drafts is left out, since looking takes time."""


@dataclass(slots=True)
class Drafter:
    lookup: Lookup
    history: History = field(default_factory=History)
    match: int = 0
    """That of the drafts that it had last."""
    rest: int = 0
    """How many steps it was left out for, after one in which no draft was worth enough."""
    left: int = 0
    """How many of them are still to come."""
    found_any: bool = False
    """Whether there were drafts in that step."""

    def rests(self, num_steps: int) -> bool:
        self.left -= num_steps
        return self.left >= 0

    def rest_longer(self, most: int) -> None:
        self.rest = self.left = min(most, 2 * self.rest + 1)


def longest_rest(num_decodes: int) -> int:
    """Return for how many steps at most a sequence rests, of so many: up to half of them."""
    return min(LONGEST_REST, num_decodes // 2)
