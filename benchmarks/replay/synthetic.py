"""Requests that nobody has recorded: at random, or from a trace; and machines that nobody has."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.load.lengths import Lengths, synthetic_lengths
from benchmarks.replay.cost import Work
from benchmarks.replay.roofline import Hardware
from benchmarks.replay.script import Script
from core.configuration.kv_layout import KVLayout
from engine.observers.frames import VERSION, Arrived, Header
from strategies.base import Limits
from strategies.factory import StrategySettings

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The cost of a step on a machine, from its data sheet."""

    hardware: Hardware

    def seconds(self, work: Work) -> float:
        return self.hardware.step_s(work.rows, work.pairs, work.keys)


def script_of_lengths(timed: Iterable[tuple[float, Lengths]], link_tokens: int) -> Script:
    """Return requests with these arrival times and lengths, whose prompts share nothing."""
    script = Script(link_tokens)
    for id, (at, lengths) in enumerate(timed):
        salt = id.to_bytes(8)
        script.arrivals.append(Arrived(at, id, lengths.prompt, lengths.generated, b"", salt))
        script.num_generated[id] = lengths.generated
    return script


def poisson(
    rate: float, duration_s: float, means: Lengths, max_length: int, seed: int
) -> list[tuple[float, Lengths]]:
    """Draw requests that arrive at random, `rate` of them a second, with log-normal lengths."""
    rng, times = random.Random(seed), list[float]()
    at = rng.expovariate(rate)
    while at < duration_s:
        times.append(at)
        at += rng.expovariate(rate)
    lengths = synthetic_lengths(len(times), max_length, seed, means)
    return list(zip(times, lengths, strict=True))


def header_of(hardware: Hardware, max_length: int) -> Header:
    """Return the header that a recording of `paged` with default limits on a machine would have."""
    settings = StrategySettings(
        batching="paged",
        num_blocks=max(0, hardware.num_kv_tokens) // BLOCK_SIZE,
        layout=KVLayout.uniform(BLOCK_SIZE),
        max_model_len=max_length,
        limits=Limits(max_sequences=256, max_step_tokens=2048),
        max_delay_s=0.1,
        kv_reservation="max",
        enable_prefix_caching=True,
        preemption_mode="recompute",
        num_swap_blocks=0,
    )
    weights_bytes = round(hardware.model.weight_bytes)
    return Header(
        VERSION, settings, "packed", False, False, BLOCK_SIZE, weights_bytes, number=0, is_idle=True
    )
