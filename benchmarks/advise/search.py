"""Searches the strategies and their limits by replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import mean

from benchmarks.advise.estimate import Estimate, Outcome, arrivals_spread, estimate, outcome
from benchmarks.advise.objective import Objective
from benchmarks.replay.cost import Cost, Work
from benchmarks.replay.figures import Tally
from benchmarks.replay.forecast import serve
from benchmarks.replay.script import Script
from benchmarks.replay.settings import changed
from core.configuration.record import Value
from core.configuration.strategy_table import BATCHING_NAMES, Batching
from engine.observers.frames import Header
from strategies.factory import StrategySettings

SIZES = (4, 8, 16, 32, 64, 128, 256)
FACTORS = (0.25, 0.5, 2, 4)
"""Of the recorded tokens in a step, those that are tried."""
WORTH_SHARE, WORTH_TIME = 0.005, 0.02
"""A limit is changed only for so many more answers within the objective, or, if there are not
fewer, for so much less time of an answer, relative. Less is noise."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A schedule that was computed."""

    changes: Mapping[str, Value]
    """From the recorded options."""
    settings: StrategySettings
    tally: Tally
    share: float
    seconds: float
    """The mean time of an answer."""

    def beats(self, other: Trial) -> bool:
        """Whether it is worth changing the options for."""
        if self.share > other.share + WORTH_SHARE:
            return True
        return self.share >= other.share and self.seconds < other.seconds * (1 - WORTH_TIME)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another cost of each step, by a factor."""

    cost: Cost
    factor: float

    def seconds(self, work: Work) -> float:
        return self.factor * self.cost.seconds(work)


class Search:
    """Tries one limit after the other, and keeps what is better."""

    def __init__(
        self,
        header: Header,
        script: Script,
        cost: Cost,
        objective: Objective,
        fixed: Mapping[str, Value],
        num_users: int | None = None,
    ) -> None:
        """fixed: options that are not searched. num_users: as in `forecast.serve`."""
        self._header, self._script, self._cost = header, script, cost
        self._objective = objective
        self._fixed = fixed
        self._num_users = num_users
        self.strategies: tuple[Batching, ...] = tuple(
            name for name in BATCHING_NAMES if fixed.get("batching", name) == name
        )

    @property
    def num_trials(self) -> int:
        """The most trials of `best` over all strategies."""
        return sum(1 + len(list(self._choices(name))) for name in self.strategies)

    def best(self, batching: Batching, tried: Callable[[], object]) -> Trial:
        """Return the best trial of a strategy. tried: called for each trial, or one left out."""
        changes = {**self._fixed}
        if batching != self._header.settings.batching:
            changes["batching"] = batching
        best = self.trial(changes)
        tried()
        for name, value in self._choices(batching):
            candidate = {**best.changes, name: value}
            if self._differs(candidate, best):
                found = self.trial(candidate)
                best = found if found.beats(best) else best
            tried()
        return best

    def trial(self, changes: Mapping[str, Value], factor: float = 1.0) -> Trial:
        """Compute a schedule. factor: of the time of each step."""
        settings = changed(self._header.settings, changes)
        cost = self._cost if factor == 1.0 else Scaled(self._cost, factor)
        tally, _ = serve(self._header, settings, self._script, cost, self._num_users)
        ended = [row for row in tally.answers() if row.last_token is not None]
        seconds = mean((row.last_token or 0.0) - row.arrived for row in ended) if ended else 0.0
        share = outcome(tally, self._objective).share
        return Trial(changes, settings, tally, share, seconds)

    def estimate(
        self, trial: Trial, uncertainty: float, error: Outcome, *, varies: bool = True
    ) -> Estimate:
        """Return the estimate of a trial, after two more with steps that are faster and slower.

        uncertainty: of their time, relative. A load that varies has the same effect. error, varies:
        as in `estimate`.
        """
        # How many requests come is no chance where users wait for answers.
        is_chance = varies and self._num_users is None
        arrivals = arrivals_spread(trial.tally) if is_chance else 0.0
        span = 1 + uncertainty + arrivals
        others = (self.trial(trial.changes, factor).tally for factor in (1 / span, span))
        return estimate(
            (trial.tally, *others), self._objective, error, varies=varies, arrivals=arrivals
        )

    def _choices(self, batching: Batching) -> Iterator[tuple[str, Value]]:
        """Yield the options to try in turn, each with a value."""
        tokens = self._header.settings.limits.max_step_tokens
        limits: dict[str, tuple[Value, ...]] = {}
        if batching == "dynamic":
            limits = {"batch_size": SIZES, "max_batch_delay": (0, 10, 50, 100)}
        elif batching != "none":
            if batching == "continuous":
                limits["kv_reservation"] = ("pow2", "oracle", "max")
            limits["max_rolling_batch_size"] = SIZES
            limits["max_rolling_batch_prefill_tokens"] = tuple(
                round(tokens * factor) for factor in FACTORS
            )
            if batching == "paged" and not self._header.settings.enable_prefix_caching:
                limits["enable_prefix_caching"] = (True,)
        for name, values in limits.items():
            if name not in self._fixed:
                yield from ((name, value) for value in values)

    def _differs(self, changes: Mapping[str, Value], best: Trial) -> bool:
        """Whether options may lead to another schedule than the best one's."""
        settings = changed(self._header.settings, changes)
        limits, before = settings.limits, best.settings.limits
        if settings == best.settings or limits.max_step_tokens < limits.max_sequences:
            return False
        # A limit that no step has reached can be raised or lowered without effect.
        sizes = (limits.max_sequences, before.max_sequences)
        is_reached = min(sizes) <= best.tally.most_sequences
        return is_reached or settings.batching == "dynamic" or sizes[0] == sizes[1]
