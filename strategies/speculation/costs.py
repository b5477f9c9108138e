"""What steps cost, as measured at start: seconds by rows, that is, by tokens computed.

The cost of a step depends mostly on its rows, and not evenly: products work in tiles of rows, so
that one row more is nearly free until a tile is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

ACCEPTANCES = tuple(number / 100 for number in range(1, 100))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    plain: tuple[float, ...]
    """Seconds of a step of so many decodes, by their number. The first entry is unused."""
    drafted: tuple[float, ...]
    """Seconds of a step of so many rows, if each sequence has `width` of them."""
    width: int
    hidden: tuple[float, ...] = ()
    """Seconds of a step of so many decodes that overlap the next one, up to the last entry. What
    follows a step with drafts depends on which of them are right, so they overlap nothing."""
    mixing: float = 0.0
    """Further seconds of a step in which a single sequence of many has a draft, beside a step of as
    many decodes as it has rows."""
    context: int = 0
    """Tokens in the contexts for which these were measured."""
    per_key: float = 0.0
    """Further seconds for each token by which the context of a row is longer than that."""
    draw: float = 0.0
    """Further seconds of a step that samples at drafts which are not greedy: it samples twice."""
    per_draw: float = 0.0
    """Further seconds for each such draft."""
    per_pass: float = 0.0
    """Seconds of a draft model's pass, which gives several sequences one draft more."""
    per_proposal: float = 0.0
    """Further seconds for each of these drafts."""
    per_read: float = 0.0
    """Seconds for each token that a draft model reads before it proposes the first."""

    def of(self, num_decodes: int, num_drafts: int = 0) -> float:
        """Return the seconds of a step of so many sequences, with so many drafts in all.

        Rows cost most, but sequences cost something as well. The fewer of a step's rows are drafts,
        the more it takes as long as one of as many sequences as it has rows.
        """
        num_rows = num_decodes + num_drafts
        most = min(num_rows, len(self.plain) - 1)
        if not num_drafts and num_rows == most:
            return self.plain[most] - self.overlapping(num_decodes)
        drafted = _at(self.drafted, num_rows)
        # What sequences cost beside their rows grows with them, also where none were timed.
        sequences = (self.plain[most] - _at(self.drafted, most)) * num_rows / most
        if not num_drafts:
            return drafted + sequences - self.overlapping(num_decodes)
        fewest = num_rows / self.width
        share = min(1.0, max(0.0, (num_decodes - fewest) / (num_rows - fewest)))
        return drafted + share * (max(0.0, sequences) + self.mixing)

    def overlapping(self, num_decodes: int) -> float:
        """Return the seconds of a step without drafts that pass while another one runs."""
        if not self.hidden:
            return 0.0
        hidden = self.hidden[min(num_decodes, len(self.hidden) - 1)]
        most = min(num_decodes, len(self.plain) - 1)
        return min(hidden, self.plain[most] / 2)  # the host's part, or the device's

    def proposing(self, num_passes: int, num_drafts: int, *, is_greedy: bool = True) -> float:
        """Return the seconds that it takes to propose so many drafts, in so many passes.

        is_greedy: if not, passes sample as steps do.
        """
        seconds = num_passes * self.per_pass + num_drafts * self.per_proposal
        if self.per_pass and not is_greedy:
            seconds += num_passes * self.draw + num_drafts * self.per_draw
        return seconds

    def break_even(self, num_sequences: int, most_drafts: int) -> float | None:
        """Return the acceptance from which up to `most_drafts` drafts of each sequence pay.

        None: they never do.
        """
        plain = num_sequences / self.of(num_sequences)
        for acceptance in ACCEPTANCES:
            tokens = num_sequences
            for count in range(1, most_drafts + 1):
                tokens += num_sequences * acceptance**count
                num_drafts = num_sequences * count
                seconds = self.of(num_sequences, num_drafts) + self.proposing(count, num_drafts)
                if tokens / seconds > plain:
                    return acceptance
        return None


def _at(table: tuple[float, ...], num_rows: int) -> float:
    """Return an entry. Beyond the table, the last one counts for each row."""
    last = len(table) - 1
    return table[num_rows] if num_rows <= last else table[last] * num_rows / last


def curve(measured: Mapping[int, float], most: int) -> tuple[float, ...]:
    """Return the seconds of 0 to `most` rows, between and beyond those of measured numbers.

    A step never takes longer than one with more rows: such a time was disturbed. Beyond the
    greatest number, each row costs what one of it costs: rows that nobody has timed are not cheap.
    """
    rows = sorted(measured)
    seconds: list[float] = []
    for count in reversed(rows):
        seconds.insert(0, min([measured[count], *seconds[:1]]))
    table = [seconds[0]] * (rows[0] + 1)
    for (m, n), (a, b) in zip(pairwise(rows), pairwise(seconds), strict=True):
        table += (a + (b - a) * (count - m) / (n - m) for count in range(m + 1, n + 1))
    table += (seconds[-1] * count / rows[-1] for count in range(rows[-1] + 1, most + 1))
    return tuple(table[: most + 1])
