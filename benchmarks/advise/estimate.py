"""How well requests fare, with intervals that a later recording should be in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, stdev

import msgspec

from benchmarks.advise.objective import Objective
from benchmarks.replay.cost import T_90
from benchmarks.replay.figures import Tally

STRETCHES = 10
Z_90 = 1.645
"""90 % of a normal distribution is within so many deviations."""


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How the answers of a schedule fared."""

    share: float
    """Of all answers that were asked for: those that met the objective."""
    per_s: float
    """Answers a second that met it, from the first arrival to the last token."""
    most_blocks: float
    """KV blocks held at once."""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    value: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """An outcome with intervals, in which 9 of 10 later recordings should be."""

    share: Interval
    per_s: Interval
    most_blocks: Interval

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.share.value, self.per_s.value, self.most_blocks.value)


def outcome(tally: Tally, objective: Objective) -> Outcome:
    met = [objective.is_met(answer) for answer in tally.answers()]
    share = mean(met) if met else 0.0
    return Outcome(share, sum(met) / (tally.seconds or 1.0), tally.most_blocks)


def estimate(
    tallies: Sequence[Tally],
    objective: Objective,
    error: Outcome,
    *,
    varies: bool = True,
    arrivals: float = 0.0,
) -> Estimate:
    """Return the estimate of a schedule.

    tallies: as computed, and with steps that are faster and slower by what is not known of the
    machine and the load. error: by how much the model missed the recording under its own options;
    relative, except the share. varies: whether it is for other requests of the same kind. Then
    their variation from tenth to tenth of the recording is added. arrivals: by how much their
    number varies, relative.
    """
    outcomes = [outcome(tally, objective) for tally in tallies]
    met = [objective.is_met(answer) for answer in tallies[0].answers()]
    value = outcomes[0]
    low, high = _spread(met) if varies else (value.share, value.share)
    shares = [each.share for each in outcomes]
    share = Interval(
        value.share,
        max(0.0, min(shares) - (value.share - low) - error.share),
        min(1.0, max(shares) + (high - value.share) + error.share),
    )
    rates = [len(met) / (tally.seconds or 1.0) for tally in tallies]
    per_s = Interval(
        value.per_s,
        share.low * min(rates) * (1 - min(1.0, error.per_s + arrivals)),
        share.high * max(rates) * (1 + error.per_s + arrivals),
    )
    blocks = [each.most_blocks for each in outcomes]
    most_blocks = Interval(
        value.most_blocks,
        min(blocks) * (1 - error.most_blocks),
        max(blocks) * (1 + error.most_blocks),
    )
    return Estimate(share, per_s, most_blocks)


def error_of(computed: Outcome, recorded: Outcome) -> Outcome:
    """Return how far a computed outcome is off: relative, except the share."""
    return Outcome(
        abs(computed.share - recorded.share),
        min(1.0, abs(computed.per_s / recorded.per_s - 1)) if recorded.per_s else 0.0,
        min(1.0, abs(computed.most_blocks / recorded.most_blocks - 1))
        if recorded.most_blocks
        else 0.0,
    )


def _spread(met: Sequence[bool]) -> tuple[float, float]:
    """Return the interval of the share: Wilson's, or wider if tenths of the answers differ more."""
    count = len(met)
    if not count:
        return 0.0, 1.0
    share, z2 = mean(met), Z_90**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_90 * (share * (1 - share) / count + z2 / (4 * count**2)) ** 0.5 / (1 + z2 / count)
    low, high = center - half, center + half
    if count >= 5 * STRETCHES:
        edges = [count * i // STRETCHES for i in range(STRETCHES + 1)]
        tenths = [mean(met[a:b]) for a, b in pairwise(edges)]
        half = T_90 * stdev(tenths) / STRETCHES**0.5
        low, high = min(low, share - half), max(high, share + half)
    return low, high


def arrivals_spread(tally: Tally) -> float:
    """Return by how much the number of answers varies between recordings, relative."""
    times = [answer.arrived for answer in tally.answers()]
    if len(times) < 2 or times[-1] == times[0]:
        return 1.0
    counts = [0] * STRETCHES
    for at in times:
        counts[min(STRETCHES - 1, int((at - times[0]) / (times[-1] - times[0]) * STRETCHES))] += 1
    return T_90 * stdev(counts) / STRETCHES**0.5 / mean(counts)
