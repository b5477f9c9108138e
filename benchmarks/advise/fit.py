"""What a forecast needs to know of a recording: its requests, the cost of a step, and the error."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.advise.estimate import Outcome, error_of, outcome
from benchmarks.advise.objective import Objective
from benchmarks.advise.search import Search
from benchmarks.replay.cost import FittedCost, fitted
from benchmarks.replay.figures import Tally
from benchmarks.replay.forecast import check_computable
from benchmarks.replay.recorded import recorded_tally
from benchmarks.replay.script import Script, script_of
from engine.observers.store import Recording


@dataclass(frozen=True, slots=True)
class Fit:
    script: Script
    cost: FittedCost
    tally: Tally
    """As recorded."""
    recorded: Outcome
    error: Outcome
    """What the cost model misses of the recording."""


def fit(recording: Recording, objective: Objective, num_users: int | None) -> Fit:
    """Fit the cost model, and try it on the recording itself.

    Raises ValueError if no other schedule can be computed.
    """
    header = recording.header
    check_computable(header)
    cost = fitted(recording.frames)
    script = script_of(recording.frames, header.link_tokens)
    tally = recorded_tally(recording)
    recorded = outcome(tally, objective)
    computed = Search(header, script, cost, objective, {}, num_users).trial({})
    error = error_of(outcome(computed.tally, objective), recorded)
    return Fit(script, cost, tally, recorded, error)
