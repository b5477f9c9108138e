"""Measures the gain of prefix caching in requests per second on a real model."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.closed_loop import ClosedLoop
from benchmarks.load.lengths import Lengths
from benchmarks.load.workload import WorkloadRequest
from core.configuration.options import make_options
from engine.build import build_engine
from engine.engine import Engine

PAIRS = 3
CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Gain:
    """Medians over pairs of consecutive runs, one with the prefix cache and one without."""

    ratio: float
    with_cache: float
    """Requests per second."""
    without_cache: float
    num_requests: int
    """Requests per run."""


def measure_gain(
    model_dir: Path, lengths: Sequence[Lengths], system_prompt: int, pairs: int = PAIRS
) -> Gain:
    """Measure the gain with prompts that all begin with the same `system_prompt` tokens.

    Both runs of a pair serve the same requests; each pair has new prompts. Raises ValueError if no
    request fits into the model's context after the system prompt.
    """
    engines = {is_cached: _engine(model_dir, is_cached) for is_cached in (True, False)}
    room = engines[True].facts.max_model_len - system_prompt
    fitting = [length for length in lengths if length.prompt + length.generated <= room]
    if not fitting:
        raise ValueError(
            f"no request fits into the {room + system_prompt} tokens of {model_dir} after a system "
            f"prompt of {system_prompt}; use a shorter --system-prompt"
        )
    vocab_size = engines[True].facts.vocab_size
    for engine in engines.values():
        _run(engine, _requests(fitting[:2], system_prompt, vocab_size, seed=pairs))
    rates: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        requests = _requests(fitting, system_prompt, vocab_size, seed=pair)
        for is_cached in (True, False) if pair % 2 == 0 else (False, True):
            rates[is_cached].append(_run(engines[is_cached], requests))
    ratios = [cached / uncached for cached, uncached in zip(*rates.values(), strict=True)]
    medians = {is_cached: statistics.median(values) for is_cached, values in rates.items()}
    return Gain(statistics.median(ratios), medians[True], medians[False], len(fitting))


def _engine(model_dir: Path, is_cached: bool) -> Engine:
    options = make_options(
        {"model_id": str(model_dir), "batching": "paged", "enable_prefix_caching": is_cached}
    )
    return build_engine(model_dir, options)


def _requests(
    lengths: Sequence[Lengths], system_prompt: int, vocab_size: int, *, seed: int
) -> list[WorkloadRequest]:
    rng = random.Random(seed)
    system = rng.choices(range(vocab_size), k=system_prompt)
    return [
        WorkloadRequest(system + rng.choices(range(vocab_size), k=length.prompt), length.generated)
        for length in lengths
    ]


def _run(engine: Engine, requests: Sequence[WorkloadRequest]) -> float:
    journal = ClosedLoop(engine, CLIENTS).run(requests)
    return len(requests) / (journal.end - journal.begin)
