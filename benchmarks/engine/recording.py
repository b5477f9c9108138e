"""What `option.record` costs: the CPU time of decode steps with it and without, in pairs.

Sequences of one engine decode at once, in one thread. Some steps are recorded, the next ones are
not. The CPU time of the process counts, user and system, so other programs on the machine matter
less.

Example: OMP_NUM_THREADS=1 python -m benchmarks.engine.recording --model models/demo
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import torch

from core.sampling import SamplingParams
from engine.builders.observe import header_of
from engine.engine import Engine
from engine.executor import Observer
from engine.observers.recorder import Recorder
from engine.observers.store import RecordingWriter
from engine.offline.llm import LLM

PROMPT_TOKENS = 64
BLOCK = 10
"""Steps of each side of a pair."""
PAIRS_OF_ANSWER = 6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/demo", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--sequences", type=int, default=16, help="default: %(default)s")
    given = parser.parse_args()
    torch.set_num_threads(1)
    costs: list[float] = []
    plain: list[float] = []
    with LLM(given.model, max_rolling_batch_size=given.sequences) as llm:
        engine = llm.llm_engine
        rng = random.Random(0)
        list(_pairs(engine, given.sequences, rng))  # to warm up
        while len(costs) < given.pairs:
            for without, recorded in _pairs(engine, given.sequences, rng):
                plain.append(without)
                costs.append(recorded - without)
    low, middle, high = quantiles(costs, n=4)
    step_s = median(plain)
    print(
        f"{given.model}, {given.sequences} sequences at once, {len(costs)} pairs: "
        f"{step_s * 1e3:.3g} ms of CPU time a step; a recording adds {middle * 1e6:.0f} µs "
        f"({middle / step_s:+.2%}), half of the pairs {low * 1e6:.0f} to {high * 1e6:.0f} µs"
    )
    return 0


def _pairs(engine: Engine, num_sequences: int, rng: random.Random) -> Iterator[tuple[float, float]]:
    """Yield the CPU seconds of a step without a recording and with one, of some decode steps."""
    num_steps = 2 * BLOCK * PAIRS_OF_ANSWER
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
    vocab_size = engine.facts.vocab_size
    for _ in range(num_sequences):
        prompt = [rng.randrange(1, vocab_size) for _ in range(PROMPT_TOKENS)]
        engine.add(prompt, params, time.monotonic())
    while engine.strategy.waiting or any(
        sequence.num_pending_tokens != 1
        for group in engine.strategy.running
        for sequence in group.sequences
    ):
        engine.step(time.monotonic())
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordingWriter(Path(folder), header_of(engine), 2**30, 3600)
        recorder = Recorder(
            engine.strategy,
            lambda frames: writer.write(frames, is_idle=not engine.has_work()),
            model_time=engine.model_time,
        )
        for number in range(PAIRS_OF_ANSWER):
            order = (Observer(), recorder) if number % 2 else (recorder, Observer())
            seconds = {observer is recorder: _cpu_s(engine, observer) for observer in order}
            yield seconds[False], seconds[True]
        engine.observer = Observer()
        writer.close()
    while engine.has_work():
        engine.step(time.monotonic())


def _cpu_s(engine: Engine, observer: Observer) -> float:
    """Return the CPU seconds of a step that an observer sees."""
    engine.observer = observer
    begin = time.process_time()
    for _ in range(BLOCK):
        engine.step(time.monotonic())
    return (time.process_time() - begin) / BLOCK


if __name__ == "__main__":
    sys.exit(main())
