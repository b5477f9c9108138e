"""Find the options under which the requests of a recording would have fared best, by replay.

The strategies that serve run the recorded requests again, with one limit after the other and a cost
model of a step that is fitted to the recording (see `longshore replay`). Intervals cover 9 of 10
recordings of such requests; --score says whether they did.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.advise.advice import VERSION, Advice, Forecast
from benchmarks.advise.estimate import Outcome, outcome
from benchmarks.advise.fit import fit
from benchmarks.advise.objective import Objective
from benchmarks.advise.report import recommendation, table, unknowns, verdict
from benchmarks.advise.search import Search, Trial
from benchmarks.replay.cost import LinearCost
from benchmarks.replay.forecast import check_computable
from benchmarks.replay.recorded import recorded_tally, title
from benchmarks.replay.script import Script, script_of, set_load
from benchmarks.replay.settings import add_options, add_recording, given_options
from core.errors import ConfigurationError
from engine.observers.store import Recording, read_recording

DEFAULT_OBJECTIVE = "ttft=2s,itl=200ms"
EXAMPLES = """examples:
  %(prog)s DIR --objective ttft=500ms,itl=60ms --out advice.json
  %(prog)s DIR --load 1.5                  # if half as many requests more came
  %(prog)s DIR --batching paged --max-rolling-batch-size 32    # search only what is not given
  %(prog)s --score DIR2 advice.json        # was it true? 1 if not
"""


def main(arguments: list[str] | None = None, prog: str = "python -m benchmarks.advise") -> int:
    """Return the exit code: 1 if a score finds a forecast that was wrong."""
    parser = make_parser(prog)
    given = parser.parse_args(arguments)
    try:
        if given.score is not None:
            recording, advice = given.score
            return _score(read_recording(Path(recording), given.run), Advice.read(Path(advice)))
        if given.recording is None:
            parser.error("name the folder of a recording, or --score DIR2 ADVICE")
        return _advise(read_recording(given.recording, given.run), given)
    except (OSError, ValueError, ConfigurationError) as error:
        parser.error(str(error))


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recording(parser)
    parser.add_argument(
        "--objective", default=DEFAULT_OBJECTIVE, metavar="BOUNDS",
        help="what each answer should meet: ttft (to the first token), itl (between two tokens, "
        f"mean of the answer), e2e (to the last token); default: {DEFAULT_OBJECTIVE}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="ADVICE", help="write the forecasts there")
    parser.add_argument(
        "--score", nargs=2, metavar=("DIR2", "ADVICE"),
        help="compare the forecasts of a file with a later recording",
    )  # fmt: skip
    parser.add_argument(
        "--users", type=_count, metavar="N",
        help="let N users each send the next request when they have an answer, as load tests do "
        "(default: requests arrive when they did)",
    )  # fmt: skip
    add_options(parser.add_argument_group("options of `longshore serve` that are not searched"))
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _advise(recording: Recording, given: argparse.Namespace) -> int:
    objective, header = Objective.parse(given.objective), recording.header
    known = fit(recording, objective, given.users)
    script, cost = known.script, known.cost
    set_load(script, given.load)
    search = Search(header, script, cost, objective, given_options(given), given.users)
    forecasts = _search(search, cost.uncertainty, known.error)
    advice = Advice(
        version=VERSION,
        objective=objective.text,
        num_users=given.users,
        arrivals_per_s=_rate(script),
        factors=cost.factors,
        uncertainty=cost.uncertainty,
        error=known.error,
        forecasts=forecasts,
    )
    rows = {"recorded": known.recorded} | {each.name: each.estimate for each in forecasts}
    unknown = unknowns(recording, advice, known.tally.most_sequences, given.load)
    print(title(recording), cost.quality, f"objective: {objective.text}", "", sep="\n")
    print(*table(rows, header.settings.layout.block_bytes), "", sep="\n")
    print(*recommendation(advice), "", sep="\n")
    print("Not known:", *unknown, sep="\n- ")
    if given.out is not None:
        advice.write(given.out)
    return 0


def _search(search: Search, uncertainty: float, error: Outcome) -> list[Forecast]:
    """Return the forecasts of the recorded options and of each strategy's best, the best first."""
    total = 1 + search.num_trials + 2 * (1 + len(search.strategies))
    with tqdm(total=total, desc="replays", disable=None, leave=False) as bar:
        trials = [search.trial({})]
        bar.update()
        for batching in search.strategies:
            found = search.best(batching, bar.update)
            if all(found.settings != trial.settings for trial in trials):
                trials.append(found)
        forecasts: list[Forecast] = []
        for trial in _ranked(trials):
            found = search.estimate(trial, uncertainty, error)
            most = trial.tally.most_sequences
            forecasts.append(Forecast({**trial.changes}, trial.settings, found, most))
            bar.update(2)
    return forecasts


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best trial first. The recorded options stay before what does not beat them."""
    ranked: list[Trial] = []
    for trial in trials:
        place = next((i for i, other in enumerate(ranked) if trial.beats(other)), len(ranked))
        ranked.insert(place, trial)
    return ranked


def _score(recording: Recording, advice: Advice) -> int:
    """Compare a forecast with what was recorded later. Return 1 if it was wrong."""
    header, objective = recording.header, Objective.parse(advice.objective)
    check_computable(header)
    forecast, others = advice.forecast_of(header.settings)
    script = script_of(recording.frames, header.link_tokens)
    cost = LinearCost(advice.factors)
    search = Search(header, script, cost, objective, {}, advice.num_users)
    again = search.estimate(search.trial({}), advice.uncertainty, advice.error, varies=False)
    found = outcome(recorded_tally(recording), objective)
    rows = {
        f"forecast: {forecast.name}": forecast.estimate,
        "forecast for these requests": again,
        "recorded": found,
    }
    first, is_right = verdict(forecast.estimate, found)
    second, _ = verdict(again, found)
    print(title(recording), f"objective: {objective.text}", "", sep="\n")
    print(*table(rows, header.settings.layout.block_bytes), "", sep="\n")
    rates = f"{advice.arrivals_per_s:.3g} requests/s, and now {_rate(script):.3g}"
    print(f"Within the interval of the forecast, made for {rates}: {first}")
    print(f"Within that for these requests: {second}")
    if others:
        print(f"Settings that the forecast did not have: {', '.join(others)}")
    return 0 if is_right else 1


def _rate(script: Script) -> float:
    times = [arrived.at for arrived in script.arrivals]
    return len(times) / (max(times) - min(times) or 1.0) if times else 0.0


if __name__ == "__main__":
    sys.exit(main())
