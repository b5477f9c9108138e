"""Makes the example recording of docs/recordings.md, and scores the forecasts that it leads to.

A Llama of 88 million parameters with random weights answers requests that arrive at random, with
lengths like those of conversations. Each forecast of `longshore advise` is then tested: other
requests of the same kind, with its options.

The clock is the CPU time of this process, which computes with one thread, and it jumps ahead while
there is nothing to do. So other programs on the machine hardly matter.

Example: OMP_NUM_THREADS=1 python -m benchmarks.example_recording --out examples/recording
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.advise.__main__ import main as advise
from benchmarks.advise.advice import Advice, Forecast
from benchmarks.advise.estimate import Interval, Outcome, outcome
from benchmarks.advise.objective import Objective
from benchmarks.cpu.model import write_model
from benchmarks.load.lengths import Lengths
from benchmarks.replay.recorded import recorded_tally
from benchmarks.replay.synthetic import poisson
from core.sampling import SamplingParams
from engine.builders.observe import header_of
from engine.engine import Engine
from engine.observers.ledger import Ledger, joined
from engine.observers.recorder import Recorder
from engine.observers.store import RecordingWriter, read_recording
from engine.offline.llm import LLM

OPTIONS: dict[str, Any] = {
    "batching": "continuous",
    "max_rolling_batch_size": 64,
    "max_rolling_batch_prefill_tokens": 256,
    "max_model_len": 272,
    "num_kv_blocks": 102,
}
"""KV memory for six sequences of the greatest length."""
MEANS = Lengths(96, 32)
MAX_TOKENS = 128
"""What clients ask for; their answers end earlier."""
OBJECTIVE = "ttft=500ms,itl=60ms"
SEED_OF_TESTS = 100


class Clock:
    """The CPU time of the process, and the time that was skipped."""

    def __init__(self) -> None:
        self._start = time.process_time_ns()

    def ns(self) -> int:
        return time.process_time_ns() - self._start

    @property
    def now(self) -> float:
        return self.ns() / 1e9

    def skip_to(self, at: float) -> None:
        self._start -= max(0, round((at - self.now) * 1e9))


@dataclass(frozen=True, slots=True)
class Load:
    rate: float
    """Requests a second."""
    seconds: float

    def requests(self, seed: int) -> list[tuple[float, Lengths]]:
        longest = OPTIONS["max_model_len"]
        drawn = poisson(self.rate, self.seconds, MEANS, longest, seed)
        return [
            (at, Lengths(min(each.prompt, longest - MAX_TOKENS), min(each.generated, MAX_TOKENS)))
            for at, each in drawn
        ]


def record(
    folder: Path, model: Path, options: Mapping[str, Any], load: Load, seed: int
) -> dict[str, float]:
    """Record a run. Return how long its requests queued together, by reason."""
    with LLM(str(model), **OPTIONS | dict(options)) as llm:
        return _record(folder, llm.llm_engine, load.requests(seed), random.Random(seed))


def _record(
    folder: Path, engine: Engine, requests: Sequence[tuple[float, Lengths]], rng: random.Random
) -> dict[str, float]:
    _run(engine, requests[:8], rng, Clock())  # to warm up
    clock = Clock()
    writer = RecordingWriter(folder, header_of(engine), 2**24, 3600)
    recorder = Recorder(
        engine.strategy,
        lambda frames: writer.write(frames, is_idle=not engine.has_work()),
        clock_ns=clock.ns,
    )
    ledger = Ledger(engine.strategy, clock.ns)
    engine.observer = joined([recorder, ledger])
    _run(engine, requests, rng, clock)
    writer.close()
    return {reason: count / 1e9 for reason, count in ledger.closed.queued_ns.items()}


def _run(
    engine: Engine, requests: Sequence[tuple[float, Lengths]], rng: random.Random, clock: Clock
) -> None:
    """Send requests when it is time, and stop each answer at its length, as a stop string would."""
    waiting = list(reversed(requests))
    left: dict[int, int] = {}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    while waiting or engine.has_work():
        if not engine.has_work():
            clock.skip_to(waiting[-1][0])
        while waiting and waiting[-1][0] <= clock.now:
            at, lengths = waiting.pop()
            prompt = [rng.randrange(1, engine.facts.vocab_size) for _ in range(lengths.prompt)]
            left[engine.add(prompt, params, at)] = lengths.generated
        num_steps = engine.num_steps
        for output in engine.step(clock.now):
            left[output.request_id] -= len(output.token_ids)
            if left[output.request_id] <= 0 and output.finish is None:
                engine.abort(output.request_id, None, "stop_string")
        if engine.num_steps == num_steps and engine.has_work():
            _wait(engine, waiting, clock)


def _wait(engine: Engine, waiting: Sequence[tuple[float, Lengths]], clock: Clock) -> None:
    """Skip to when something may be scheduled."""
    times = [at for at in (engine.wake_at(), waiting[-1][0] if waiting else None) if at is not None]
    if times:
        clock.skip_to(min(times))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the recording")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second (default: 10)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of requests (default: 15)")
    parser.add_argument("--objective", default=OBJECTIVE, help=f"default: {OBJECTIVE}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    load = Load(given.rate, given.seconds)
    with tempfile.TemporaryDirectory() as temporary:
        model, path = Path(temporary) / "model", Path(temporary) / "advice.json"
        write_model("llama-88m", model)
        queued = record(given.out, model, {}, load, seed=0)
        print("queued, in seconds:", {name: round(value, 1) for name, value in queued.items()})
        advise([str(given.out), "--objective", given.objective, "--out", str(path)], "advise")
        advice = Advice.read(path)
        lines = ["| options | | forecast | recorded | |", "| --- | --- | --- | --- | --- |"]
        for number, forecast in enumerate(advice.forecasts):
            folder = Path(temporary) / f"test-{number}"
            record(folder, model, forecast.changes, load, SEED_OF_TESTS + number)
            advise(["--score", str(folder), str(path)], "advise")
            found = outcome(
                recorded_tally(read_recording(folder)), Objective.parse(given.objective)
            )
            lines += _rows(forecast, found)
        print(*lines, sep="\n")
    return 0


def _rows(forecast: Forecast, found: Outcome) -> list[str]:
    """Return the rows of a table that compare a forecast with what was recorded."""
    estimate = forecast.estimate
    figures: tuple[tuple[str, Interval, float, str], ...] = (
        ("within the objective", estimate.share, found.share, ".0%"),
        ("requests/s within it", estimate.per_s, found.per_s, ".3g"),
        ("most KV blocks", estimate.most_blocks, found.most_blocks, ".3g"),
    )
    return [
        f"| {forecast.name} | {name} "
        f"| {each.value:{form}} ({each.low:{form}} to {each.high:{form}}) "
        f"| {value:{form}} | {'yes' if value in each else '**no**'} |"
        for name, each, value, form in figures
    ]


if __name__ == "__main__":
    sys.exit(main())
