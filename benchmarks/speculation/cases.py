"""What `benchmarks.speculation` asks, ours and other systems alike, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

REFRAIN, LINE = "{1}: {0}\n" * 6, "{1}: {0}\n"
"""Prompts: a line and a name, six times or once."""
LINES = ("O Romeo, Romeo, wherefore art thou Romeo?", "Now is the winter of our discontent.",
         "Friends, Romans, countrymen, lend me your ears.")  # fmt: skip


@dataclass(frozen=True)
class Gain:
    what: str
    users: int
    tokens_per_s: float
    """Without drafts."""
    gain: float
    lowest: float
    highest: float
    tokens_per_step: float
    """Of a sequence, with drafts."""
    accepted: float
    """The share of drafts."""
    ideal: float | None = None

    def __str__(self) -> str:
        ideal = "" if self.ideal is None else f", ideal {self.ideal:.2f}"
        return (
            f"{self.what:10} {self.users:3} users: {self.tokens_per_s:8,.0f} tokens/s, with drafts "
            f"{self.tokens_per_s * self.gain:8,.0f}, {self.gain:.2f}x ({self.lowest:.2f} to "
            f"{self.highest:.2f}){ideal}; {self.tokens_per_step:.2f} tokens a step, "
            f"{self.accepted:.0%} accepted"
        )


def gain_of(
    what: str,
    users: int,
    tokens: int,
    plain: Sequence[float],
    drafting: Sequence[float],
    counts: Sequence[int],
) -> Gain:
    """Return what another system gains.

    tokens: of an answer. plain, drafting: seconds of each round, without drafts and with them.
    counts: drafts in all rounds, and right drafts.
    """
    ratios = [seconds / others for seconds, others in zip(plain, drafting, strict=True)]
    num_drafts, num_accepted = counts
    all_tokens = users * tokens * len(plain)
    return Gain(
        what,
        users,
        users * tokens / median(plain),
        median(ratios),
        min(ratios),
        max(ratios),
        all_tokens / max(1, all_tokens - num_accepted),
        num_accepted / max(1, num_drafts),
    )


def turns(rounds: int) -> range:
    """Return numbers that tell the requests of the rounds, and those before the first, apart.

    A proposer that remembers answers must not know those of a round from the one before.
    """
    return range(rounds + 1)


def prompts_of(users: int, form: str, turn: int) -> list[str]:
    numbers = range(turn * users, (turn + 1) * users)
    return [form.format(LINES[number % len(LINES)], f"Lord {number}") for number in numbers]
