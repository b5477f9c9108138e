"""What `benchmarks.speculation` asks, ours and other systems alike, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

REFRAIN, LINE = "{1}: {0}\n" * 6, "{1}: {0}\n"
"""Prompts: a line and a name, six times or once."""
LINES = ("O Romeo, Romeo, wherefore art thou Romeo?", "Now is the winter of our discontent.",
         "Friends, Romans, countrymen, lend me your ears.")  # fmt: skip
PASSAGE = """\
O {0}, {0}! wherefore art thou {0}?
Deny thy father and refuse thy name;
Or, if thou wilt not, be but sworn my love,
And I'll no longer be a Capulet.
'Tis but thy name that is my enemy;
Thou art thyself, though not a Montague.
What's Montague? it is nor hand, nor foot,
Nor arm, nor face, nor any other part
Belonging to a man. O, be some other name!
What's in a name? that which we call a rose
By any other name would smell as sweet;
So {0} would, were he not {0} call'd,
Retain that dear perfection which he owes
Without that title.
"""
CHAT = """\
User: Who speaks of a rose, {0}?
Assistant: Juliet does: "What's in a name? that which we call a rose / By any other name would \
smell as sweet."
User: And of her enemy?
Assistant: She says of {0}: "'Tis but thy name that is my enemy; / Thou art thyself, though not a \
Montague."
User: Put both into one answer.
Assistant:"""
LAST_TURN = """\
 At first she finds that only a word stands between them: "'Tis but thy name that is my enemy; \
/ Thou art thyself, though not a Montague." From there she goes on to {0}, and to all things: \
"What's in a name? that which we call a rose / By any other name would smell as sweet." In short, \
"that which we call a rose" keeps its smell, and he stays who he is, "though not a Montague".
"""


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, both with a place for a name."""

    prompt: str
    answer: str


EDITS = Text(PASSAGE.format("Romeo") + "\nThe same, to {0}:\n\n", PASSAGE)
QUOTES = Text(CHAT, LAST_TURN)


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
    return [
        form.format(LINES[number % len(LINES)], name)
        for number, name in enumerate(names_of(users, turn), start=turn * users)
    ]


def names_of(users: int, turn: int) -> list[str]:
    return [f"Lord {number}" for number in range(turn * users, (turn + 1) * users)]
