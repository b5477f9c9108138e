"""Says what limited the servers during a workload: KV memory, the arrival rate, or neither."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.load.plan import EACH_SENDS
from loadtest.report.leading import keep_up
from loadtest.report.rounds import in_rounds
from loadtest.report.style import number, percent
from loadtest.servers.watch import Sample
from loadtest.study.results import Run
from loadtest.study.slo import MIN_PACE

SCARCE = 0.8
"""If this share of the KV memory or more is allocated, waiting requests wait for memory."""
_SHARING = ("continuous", "paged")
"""Strategies that differ only in how they allocate KV memory."""
_BY_BATCH = ("none", "dynamic")
"""Strategies that admit no request before the batch has ended."""


def kv_tokens(runs: Sequence[Run]) -> float | None:
    """Return how many tokens fit into the KV memory; None if that is unknown or differs."""
    sizes = {
        sample.metrics["kv_blocks"] * sample.metrics["kv_block_tokens"]
        for run in runs
        for sample in run.samples
        if {"kv_blocks", "kv_block_tokens"} <= sample.metrics.keys()
    }
    return sizes.pop() if len(sizes) == 1 else None


def memory(runs: Sequence[Run]) -> str | None:
    """Return the size of the KV memory in words; None if it is unknown or differs."""
    tokens = kv_tokens(runs)
    return None if tokens is None else f"KV memory for {number(tokens)} tokens"


def conditions(runs: Sequence[Run]) -> list[str]:
    """Return the load, which all runs of a workload share, and the KV memory, both in words."""
    load = runs[0].loop.partition(": ")[2].replace(EACH_SENDS, "")
    return [load, *filter(None, [memory(runs)])]


def regime(runs: Sequence[Run]) -> str:
    """Say what limited the servers of one workload, as far as the runs show it."""
    shown = [run for run in runs if not run.variant]
    paces = [rounds.typical.measures.pace for rounds in in_rounds(shown)]
    known = [pace for pace in paces if pace is not None]
    sentences: list[str] = []
    if known and max(known) < MIN_PACE:
        sentences.append(
            "Overload: requests arrived faster than any server answered; the fastest kept up with "
            f"{percent(max(known))} of their rate."
        )
    elif keep_up(shown):
        sentences.append(
            "All servers answered as fast as requests arrived: requests/s show the load, and "
            "latencies the difference. So the latency comes first, and the shortest median on top."
        )
    sentences += _memory(runs)
    return " ".join(sentences)


def _memory(runs: Sequence[Run]) -> list[str]:
    """Say whether requests of continuous and paged waited for KV memory."""
    samples = {
        name: [sample for run in runs if run.name == name for sample in run.samples]
        for name in _SHARING
    }
    if not all(any("kv_used" in sample.metrics for sample in found) for found in samples.values()):
        return []
    short = [name for name in _SHARING if any(map(_waits_for_memory, samples[name]))]
    if not short:
        return [
            "KV memory was plentiful: no request of continuous or paged waited for it, so both run "
            "the same sequences."
        ]
    max_running = {
        name: max(sample.metrics.get("running", 0.0) for sample in samples[name])
        for name in _SHARING
    }
    return [
        f"KV memory was scarce for {' and '.join(short)}: requests waited for it. continuous ran "
        f"up to {number(max_running['continuous'])} sequences at once, paged up to "
        f"{number(max_running['paged'])}."
    ]


def memory_wait_share(run: Run) -> float | None:
    """Return the share of samples in which requests waited for KV memory; None if unknown.

    It is unknown for servers that are not ours, and for strategies in which requests also wait for
    a batch to end.
    """
    seen = [sample for sample in run.samples if "kv_used" in sample.metrics]
    if run.strategy in ("", *_BY_BATCH) or not seen:
        return None
    return sum(map(_waits_for_memory, seen)) / len(seen)


def _waits_for_memory(sample: Sample) -> bool:
    values = sample.metrics
    return values.get("waiting", 0.0) > 0 and values.get("kv_used", 0.0) >= SCARCE
