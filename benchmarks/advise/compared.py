"""Compares forecasts with what `longshore compare --record` has measured.

python -m benchmarks.advise.compared build/forecasts/aws build/forecasts/chat

Of each workload, the recording of one strategy is enough to forecast the others: with their
options, the same requests and the same users. What is compared is the load test's own goodput,
measured by the clients.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks.advise.advice import differences
from benchmarks.advise.estimate import Estimate
from benchmarks.advise.fit import fit
from benchmarks.advise.objective import Objective
from benchmarks.advise.search import Search
from benchmarks.replay.settings import OPTIONS
from core.configuration.options import option_table
from core.configuration.record import Value
from core.errors import ConfigurationError
from engine.observers.frames import Arrived
from engine.observers.store import Recording, read_recording

FOLDER_KEY = "option.record"
TIE = 0.05
"""Strategies whose measured goodput differs by less, relative, have no order."""
ENOUGH = 0.8
ONLY_PAGED = ("num_swap_blocks", "num_swap_states", "num_checkpoints", "num_host_checkpoints")
"""Settings that only `paged` has."""


class Request(msgspec.Struct):
    """The fields of a request in results.json. Seconds of the client's clock."""

    sent_s: float
    finished_s: float
    first_s: float | None = None
    gap_s: float | None = None
    """Mean time between two tokens."""
    error: str | None = None

    def meets(self, bounds: Mapping[str, float]) -> bool:
        """Whether an answer meets all bounds, as the load test counts goodput."""
        if self.error is not None or self.first_s is None:
            return False
        times = {
            "ttft": self.first_s - self.sent_s,
            "itl": self.gap_s or 0.0,
            "e2e": self.finished_s - self.sent_s,
        }
        return all(times[kind] <= bound for kind, bound in bounds.items())


class Run(msgspec.Struct):
    """A run in results.json: a workload against a strategy."""

    name: str
    workload: str
    users: int | None
    settings: dict[str, str]
    records: list[Request]
    variant: str = ""
    """Not empty: its requests are others."""


class Results(msgspec.Struct):
    objective: dict[str, float]
    runs: list[Run]
    trials: list[msgspec.Raw] = []


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run and its recording, without the warm-up."""

    run: Run
    recording: Recording


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy on a workload: forecast and measured."""

    strategy: str
    is_source: bool
    """Whether the forecasts are made from its recording."""
    forecast: Estimate
    share: float
    """Of the answers, as measured: those within the objective."""
    per_s: float
    others: Sequence[str]
    """Settings that the forecast did not have."""

    @property
    def is_right(self) -> bool:
        return self.share in self.forecast.share and self.per_s in self.forecast.per_s


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if fewer than 4 of 5 forecasts were right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="DIR",
        help="results of `longshore compare --record --no-tuning`, of one workload each",
    )  # fmt: skip
    parser.add_argument(
        "--source", default="paged", metavar="STRATEGY",
        help="the strategy whose recording the forecasts are made from (default: %(default)s)",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        found = {str(path): rows_of(path, given.source) for path in given.results}
    except (OSError, ValueError, ConfigurationError) as error:
        parser.error(str(error))
    print(*lines_of(found), sep="\n")
    rows = [row for rows in found.values() for row in rows if not row.is_source]
    pairs = [pair for rows in found.values() for pair in orders(rows)]
    num_right, num_ordered = sum(row.is_right for row in rows), sum(pairs)
    print(
        "",
        f"Share and requests/s within the intervals: {num_right} of {len(rows)}.",
        f"Two strategies in the right order: {num_ordered} of {len(pairs)}.",
        sep="\n",
    )
    is_enough = num_right >= ENOUGH * len(rows) and num_ordered >= ENOUGH * len(pairs)
    return 0 if is_enough else 1


def rows_of(folder: Path, source: str) -> list[Row]:
    """Forecast each strategy of a workload, the best one first, beside what was measured."""
    results = read_results(folder)
    recorded = {each.run.name: each for each in recordings_of(results) if not each.run.variant}
    if source not in recorded:
        raise ValueError(f"{folder} has no recording of {source}; it has: {', '.join(recorded)}")
    objective = _objective(results)
    run, recording = recorded[source].run, recorded[source].recording
    known = fit(recording, objective, run.users)
    search = Search(recording.header, known.script, known.cost, objective, {}, run.users)
    rows: list[Row] = []
    for name, other in recorded.items():
        trial = search.trial({} if name == source else _changes(other.run.settings))
        forecast = search.estimate(trial, known.cost.uncertainty, known.error)
        records = other.run.records
        met = [request.meets(results.objective) for request in records]
        seconds = max(each.finished_s for each in records) - min(each.sent_s for each in records)
        others = [
            each
            for each in differences(trial.settings, other.recording.header.settings)
            if each not in ONLY_PAGED
        ]
        rows.append(Row(name, name == source, forecast, mean(met), sum(met) / seconds, others))
    return sorted(rows, key=lambda row: -row.forecast.per_s.value)


def read_results(folder: Path) -> Results:
    """Raises ValueError if the results are not those of recorded runs."""
    path = folder / "results.json"
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} has no results of `longshore compare`: {error}") from error
    if results.trials or any(FOLDER_KEY not in run.settings for run in results.runs):
        raise ValueError(f"{path}: run `longshore compare` with --record and --no-tuning")
    return results


def recordings_of(results: Results) -> Iterator[Recorded]:
    """Yield each run with the part of the server's recording that has its requests."""
    num_runs: Counter[str] = Counter()
    for run in results.runs:
        folder = run.settings[FOLDER_KEY]
        num_runs[folder] += 1
        whole = read_recording(Path(folder), num_runs[folder])
        arrivals = [i for i, frame in enumerate(whole.frames) if isinstance(frame, Arrived)]
        if len(arrivals) < len(run.records):
            raise ValueError(f"{folder} has {len(arrivals)} requests, not {len(run.records)}")
        # The warm-up came before, and had ended.
        begin = arrivals[-len(run.records)]
        yield Recorded(run, dataclasses.replace(whole, frames=whole.frames[begin:]))


def orders(rows: Sequence[Row]) -> list[bool]:
    """Return for each pair of strategies that differ whether the forecast had their order."""
    return [
        first.per_s > second.per_s
        for first, second in combinations(rows, 2)
        if abs(first.per_s - second.per_s) > TIE * max(first.per_s, second.per_s)
    ]


def lines_of(found: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield (
        "| workload | strategy | within the objective: forecast | measured "
        "| requests/s within it: forecast | measured |"
    )
    yield "| --- | --- | --- | --- | --- | --- |"
    for folder, rows in found.items():
        for row in rows:
            share, per_s = row.forecast.share, row.forecast.per_s
            cells = (
                Path(folder).name,
                f"`{row.strategy}`{', recorded' if row.is_source else ''}"
                + "".join(f", other {name}" for name in row.others),
                f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})",
                _marked(f"{row.share:.0%}", is_right=row.share in share),
                f"{per_s.value:.3g} ({per_s.low:.3g} to {per_s.high:.3g})",
                _marked(f"{row.per_s:.3g}", is_right=row.per_s in per_s),
            )
            yield f"| {' | '.join(cells)} |"


def _marked(text: str, *, is_right: bool) -> str:
    return text if is_right else f"**{text}**"


def _objective(results: Results) -> Objective:
    return Objective.parse(
        ",".join(f"{kind}={limit}s" for kind, limit in results.objective.items())
    )


def _changes(settings: Mapping[str, str]) -> dict[str, Value]:
    """Return the options that a server was started with, of those that a replay may change."""
    rows = {name: option_table()[name] for name in OPTIONS}
    return {name: row.parse(settings[row.key]) for name, row in rows.items() if row.key in settings}


if __name__ == "__main__":
    sys.exit(main())
