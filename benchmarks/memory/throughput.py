"""What prefix caching gains in requests per second, on a real model and the real clock."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.closed_loop import ClosedLoop
from benchmarks.memory.trace import Lengths
from benchmarks.workload import Request
from core.options import Options
from engine.build import build_engine
from engine.engine import Engine

PAIRS = 3
CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Gain:
    """Medians over pairs of runs, one with the cache and one without right after each other."""

    ratio: float
    with_cache: float
    """Requests per second."""
    without_cache: float
    num_requests: int
    """In one run."""


def measure_gain(model_dir: Path, lengths: Sequence[Lengths], system_prompt: int) -> Gain:
    """Every prompt begins with the same `system_prompt` tokens; each pair has requests of its own.

    Raises ValueError where the model's context has no room for any of `lengths` behind them.
    """
    engines = {is_cached: _engine(model_dir, is_cached) for is_cached in (True, False)}
    room = engines[True].facts.max_model_len - system_prompt
    fitting = [each for each in lengths if each.prompt + each.generated <= room]
    if not fitting:
        raise ValueError(
            f"no request fits behind {system_prompt} tokens into the {room + system_prompt} of "
            f"{model_dir}; use a shorter --system-prompt"
        )
    vocab_size = engines[True].facts.vocab_size
    for engine in engines.values():
        _run(engine, _requests(fitting[:2], system_prompt, vocab_size, seed=PAIRS))
    rates: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        requests = _requests(fitting, system_prompt, vocab_size, seed=pair)
        for is_cached in (True, False) if pair % 2 == 0 else (False, True):
            rates[is_cached].append(_run(engines[is_cached], requests))
    ratios = [ours / without for ours, without in zip(*rates.values(), strict=True)]
    medians = {is_cached: statistics.median(each) for is_cached, each in rates.items()}
    return Gain(statistics.median(ratios), medians[True], medians[False], len(fitting))


def _engine(model_dir: Path, is_cached: bool) -> Engine:
    options = Options(model_id=str(model_dir), batching="paged", enable_prefix_caching=is_cached)
    return build_engine(model_dir, options)


def _requests(
    lengths: Sequence[Lengths], system_prompt: int, vocab_size: int, *, seed: int
) -> list[Request]:
    rng = random.Random(seed)
    system = rng.choices(range(vocab_size), k=system_prompt)
    return [
        Request(system + rng.choices(range(vocab_size), k=each.prompt), each.generated)
        for each in lengths
    ]


def _run(engine: Engine, requests: Sequence[Request]) -> float:
    """Requests per second."""
    journal = ClosedLoop(engine, CLIENTS).run(requests)
    return len(requests) / (journal.end - journal.begin)
