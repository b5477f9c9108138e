"""Which drafts to verify: rows are added while the expected tokens per second rise.

A row's worth is the probability that its draft and those before it are accepted. The rows of all
sequences compete, so in a batch where few sequences repeat something, only these have drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, get_args

from core.configuration.options import MOST_DRAFTS
from strategies.speculation.costs import StepCosts
from strategies.speculation.pace import Pace, TimedStep
from strategies.speculation.trials import Account, Comparisons

MARGIN = 1.05
"""Drafts must be worth more than the time to look for them, and than the noise of measurements."""
PRIORS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.55, 0.6, 0.65, 0.7)
"""The acceptance that is assumed for a match of so many tokens, and of more than the last."""
PRIOR_WEIGHT = 20.0
"""How many verified drafts the assumption counts for."""
MEMORY = 0.998
"""How much of what was verified before counts, after each draft."""
OWN_WEIGHT = 6.0
"""How many verified drafts of a sequence count as much as those of all others. With fewer, luck is
taken for skill: those of 50 equal sequences that were right lately get all drafts."""
OWN_MEMORY = 0.9
REST = 0.99
"""How much of a sequence's failures counts after a decision against drafts: it is tried again."""


@dataclass(slots=True)
class History:
    """How many drafts of a sequence were accepted and rejected; the last ones count most."""

    hits: float = 0.0
    misses: float = 0.0
    saved: float = 0.0
    """The part of a plain step's time that each right draft of a trial saves; 0 of other drafts."""

    def add(self, num_accepted: int, *, was_rejected: bool) -> None:
        self.hits = self.hits * OWN_MEMORY + num_accepted
        self.misses = self.misses * OWN_MEMORY + was_rejected

    def rest(self) -> None:
        self.hits *= REST
        self.misses *= REST


@dataclass(slots=True)
class Candidate:
    """Drafts that one sequence could have in a step."""

    drafts: tuple[int, ...]
    match: int
    """See `Proposal.match`."""
    num_in_flight: int
    """Proposed tokens before the drafts, in the place of a token that is not known yet."""
    history: History
    context: int
    """Tokens of the sequence."""
    is_greedy: bool
    num_unread: int = 0
    """See `Proposal.num_unread`."""
    num_left: float = inf
    """How many tokens the sequence may still get."""


@dataclass(slots=True)
class Acceptance:
    """How many drafts were accepted, by the length of the match before each."""

    hits: list[float] = field(default_factory=lambda: [p * PRIOR_WEIGHT for p in PRIORS])
    tried: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * len(PRIORS))

    def expected(self, match: int, history: History) -> float:
        """Return the probability that a draft is right if all tokens before it are."""
        place = min(match, len(PRIORS) - 1)
        mean = self.hits[place] / self.tried[place]
        own = history.hits + history.misses + OWN_WEIGHT
        return (history.hits + OWN_WEIGHT * mean) / own

    def add(self, match: int, num_accepted: int, *, was_rejected: bool) -> None:
        """Count drafts. A match grows with each that is accepted."""
        for number in range(num_accepted + was_rejected):
            place = min(match + number, len(PRIORS) - 1)
            self.hits[place] = self.hits[place] * MEMORY + (number < num_accepted)
            self.tried[place] = self.tried[place] * MEMORY + 1


Decision = Literal[
    "drafted",
    "compared",
    "tried",
    "cost",
    "unlikely",
    "not_found",
    "requests",
    "room",
    "failed",
]
"""What a step with decodes was decided to be: with drafts or, if not, why. compared: drafts seem to
pay, and one without is timed to see whether they do (`Policy.compares`). tried: with drafts that
are not expected to pay, to learn whether they do (`Policy.trial`). cost: with so many decodes, no
draft can be worth its time. unlikely: none at hand is. not_found: the proposer found none.
requests: none of them can be verified (`is_verifiable`). room: the step's budget or the blocks are
used up. failed: the proposer has failed, once and for all."""


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    steps: dict[Decision, int] = field(default_factory=lambda: dict.fromkeys(get_args(Decision), 0))
    num_decodes: int = 0
    """Chunks of these steps that decode, with or without drafts."""
    num_drafts: int = 0
    """Chunks with drafts."""
    num_draft_tokens: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    """By position: drafts there that were accepted."""

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)


class _Best(NamedTuple):
    num_drafts: int
    seconds: float
    """Those of the step, with nothing to read."""
    tokens: float
    proposing: float
    """What it costs to propose them."""


class Policy:
    def __init__(
        self, costs: StepCosts | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        """costs: None to verify all drafts, whatever it costs. clock: as in `Pace`."""
        self.costs = costs
        self.acceptance = Acceptance()
        self.pace = Pace(clock)
        self.gain = 1.0
        """How many times as many tokens per second the newest `counts` expects as without."""
        self._account = Account()
        self._proposing = 0.0
        """What it costs to propose the drafts of the newest `counts`."""
        self._expected = 0.0, 0.0
        """The seconds that the newest trial should take, and those of a step without drafts."""
        self.mean_length = inf
        """Tokens of an answer."""
        self._comparisons = Comparisons()
        self._least: dict[tuple[int, float], float] = {}
        """By the number of decodes, and how much slower than plain steps those with drafts are."""
        self._tables: dict[int, list[float]] = {}
        """See `_costs`."""

    def least_worth(self, num_decodes: int, most: int) -> float:
        """Return the worth that a draft needs at least in such a step, beside `most` at the most.

        If none is worth as much, none is verified. Above 1, none ever is.
        """
        if self.costs is None:
            return 0.0
        plain, *drafted = self.pace.of(num_decodes)
        slower = round(min(drafted) / plain, 1)
        key = num_decodes, slower
        if key not in self._least:
            costs = self._costs(num_decodes, most)
            self._least[key] = min(
                (MARGIN * (costs[count] * slower + self.costs.proposing(1, count)) / costs[0] - 1)
                * num_decodes
                / count
                for count in range(1, most + 1)
            )
        return self._least[key]

    def _costs(self, num_decodes: int, most: int) -> list[float]:
        """Return what steps of so many decodes cost, by their number of drafts, up to `most`."""
        assert self.costs is not None, "costs count"
        known = self._tables.setdefault(num_decodes, [])
        for count in range(len(known), most + 1):
            known.append(self.costs.of(num_decodes, count))
        return known

    def plain(self, num_decodes: int) -> float:
        """Return the seconds of a step without drafts."""
        return self._costs(num_decodes, 0)[0] * self.pace.of(num_decodes)[0]

    def begin(
        self,
        num_decodes: int,
        num_drafts: int,
        at: float,
        *,
        is_ahead: bool,
        is_compared: bool = False,
    ) -> None:
        """Time a step of decodes only. at: see `TimedStep.begin`; and there for the others."""
        if self.costs is not None:
            cost = self.costs.of(num_decodes, num_drafts)
            step = TimedStep(num_decodes, num_drafts, cost, at, is_ahead, is_compared)
            self.pace.begin(step)

    def counts(self, num_decodes: int, candidates: Sequence[Candidate], most: int) -> list[int]:
        """Return how many drafts of each candidate to verify: the first of its drafts.

        num_decodes: the sequences that decode in the step, of which the candidates are some.
        most: how many drafts the step may have in all.
        """
        rows = self._rows(candidates)
        # The worth first: a sequence's rows are worth less and less, so they stay in order.
        rows.sort(key=lambda row: -row[0])
        rows = rows[:most]
        if self.costs is not None:
            best = self._best(self.costs, num_decodes, candidates, rows)
            self.gain = best.tokens / best.seconds * self.plain(num_decodes) / num_decodes
            self._proposing = best.proposing
            rows = rows[: best.num_drafts]
        counts = _counted(rows, candidates)
        for count, candidate in zip(counts, candidates, strict=True):
            candidate.history.saved = 0.0
            if not count:
                candidate.history.rest()
        return counts

    def compares(self, num_decodes: int) -> bool:
        """Return whether a step is to have no drafts, though the newest `counts` has found some."""
        if self.costs is None or not self.pace.is_measured:
            return False
        overlap = self.costs.overlapping(num_decodes) > 0
        return self._comparisons.is_due(self.gain, overlap=overlap)

    def may_try(self, num_steps: int) -> bool:
        """Count steps in which drafts could pay. Return whether to look for a trial in the last."""
        return self.costs is not None and self._account.earn(num_steps)

    def trial(self, num_decodes: int, candidates: Sequence[Candidate], most: int) -> list[int]:
        """Return how many drafts of each candidate to try, if `counts` finds that none pays.

        All are 0 as long as too little time was saved up (`strategies.speculation.trials`). Once it
        does not become more, fewer candidates are tried, those first of which least is to be read.
        """
        assert self.costs is not None, "costs count"
        plain, pace = self.plain(num_decodes), self.pace.of(num_decodes)[0]
        overlapping = self.costs.overlapping(num_decodes)
        places = sorted(range(len(candidates)), key=lambda place: candidates[place].num_unread)
        while places:
            rows = _all_right([(place, len(candidates[place].drafts)) for place in places])[:most]
            best = self._best(self.costs, num_decodes, candidates, rows)
            if not best.num_drafts:
                break
            counts = _counted(rows[: best.num_drafts], candidates)
            tried = [each for each, count in zip(candidates, counts, strict=True) if count]
            unread = sum(candidate.num_unread for candidate in tried)
            seconds = best.seconds + unread * self.costs.per_read * pace
            # The step after it will overlap nothing.
            lost = max(0.0, seconds - plain + overlapping)
            if self._account.spend(lost / plain):
                self._expected = seconds, plain
                for candidate in tried:
                    candidate.history.saved = 1 / num_decodes
                return counts
            if not self._account.is_full:
                break
            places = places[: len(places) // 2]
        return [0] * len(candidates)

    def completed(self, num_decodes: int, seconds: float) -> None:
        """Count the time in which the drafts of the newest `counts` were proposed."""
        self.pace.count_passes(num_decodes, seconds, self._proposing)

    def ended(self, num_tokens: int) -> None:
        """Count an answer of so many tokens, at least one."""
        mean = num_tokens if self.mean_length == inf else self.mean_length
        self.mean_length = max(1, mean + (num_tokens - mean) / 10)

    def settle(self, seconds: float) -> None:
        """Correct what the newest trial lost by the seconds that it took."""
        expected, plain = self._expected
        self._account.correct((seconds - expected) / plain)

    def learn(self, history: History, match: int, num_accepted: int, *, was_rejected: bool) -> None:
        """Count verified drafts of a sequence. match: as in `Acceptance.add`."""
        history.add(num_accepted, was_rejected=was_rejected)
        self.acceptance.add(match, num_accepted, was_rejected=was_rejected)
        self._account.give_back(history.saved * num_accepted)

    def _rows(self, candidates: Sequence[Candidate]) -> list[tuple[float, int]]:
        """Return the worth of each draft, and the index of its candidate."""
        rows: list[tuple[float, int]] = []
        for index, candidate in enumerate(candidates):
            worth = 1.0
            for number in range(candidate.num_in_flight + len(candidate.drafts)):
                worth *= self.acceptance.expected(candidate.match + number, candidate.history)
                if number >= candidate.num_in_flight:
                    rows.append((worth, index))
        return rows

    def _best(
        self,
        costs: StepCosts,
        num_decodes: int,
        candidates: Sequence[Candidate],
        rows: Sequence[tuple[float, int]],
    ) -> _Best:
        """Return how many of the rows give the most tokens per second.

        What a draft model has to read serves all tokens that a sequence still gets, so each pays
        its part.
        """
        seconds, paces = self._costs(num_decodes, len(rows)), self.pace.of(num_decodes)
        plain, of_passes = self.plain(num_decodes), self.pace.of_passes(num_decodes)
        best, chosen = MARGIN * num_decodes / plain, _Best(0, plain, float(num_decodes), 0.0)
        tokens, further, proposing, reading, draws, passes = float(num_decodes), 0.0, 0.0, 0.0, 0, 0
        depths = [candidate.num_in_flight for candidate in candidates]
        for count, (worth, index) in enumerate(rows, start=1):
            candidate = candidates[index]
            tokens += worth
            depths[index] += 1
            further_passes = max(0, depths[index] - passes)
            proposing += costs.proposing(further_passes, 1, is_greedy=candidate.is_greedy)
            passes = max(passes, depths[index])
            if candidate.num_unread:
                of_step = worth + (depths[index] == candidate.num_in_flight + 1)
                share = min(1.0, of_step / candidate.num_left)
                reading += share * candidate.num_unread * costs.per_read * paces[0]
            further += costs.per_key * max(0, candidate.context - costs.context)
            if not candidate.is_greedy:
                further += costs.per_draw if draws else costs.draw + costs.per_draw
                draws += 1
            taken = proposing * of_passes + (seconds[count] + further) * paces[count.bit_length()]
            if tokens > best * (taken + reading):
                best = tokens / (taken + reading)
                chosen = _Best(count, taken, tokens, proposing)
        return chosen


def _counted(rows: Sequence[tuple[float, int]], candidates: Sequence[Candidate]) -> list[int]:
    """Return how many of the rows each candidate has."""
    counts = [0] * len(candidates)
    for _, index in rows:
        counts[index] += 1
    return counts


def _all_right(drafts: Sequence[tuple[int, int]]) -> list[tuple[float, int]]:
    """Return rows as if all drafts were right: the first ones of all candidates, then the second.

    drafts: the index of each candidate, and how many drafts it has.
    """
    longest = max(count for _, count in drafts)
    return [(1.0, index) for depth in range(longest) for index, count in drafts if depth < count]
