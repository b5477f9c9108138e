"""Finds the batch size and delay with which dynamic batching serves a workload best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

TUNED = "dynamic (tuned)"
"""Name of dynamic batching with the setting that was found."""
BATCH_SIZES = (16, 32, 64)
DELAYS_MS = (100, 10)
"""Longer delays are left out: a batch that does not fill waits for the whole delay."""


class Setting(msgspec.Struct, frozen=True):
    """Settings of dynamic batching."""

    batch_size: int
    delay_ms: int

    def properties(self) -> dict[str, str]:
        return {"batch_size": str(self.batch_size), "max_batch_delay": str(self.delay_ms)}


DEFAULT = Setting(batch_size=32, delay_ms=100)
"""The setting of a server whose properties have none."""


class Trial(msgspec.Struct, kw_only=True):
    """A short run with one setting."""

    workload: str
    settings: dict[str, str]
    """The server's properties."""
    is_given: bool = False
    """Whether the setting is that of the given properties."""
    requests_per_s: float


def given_setting(properties: Mapping[str, str]) -> Setting:
    """Return the setting that a server has with these properties."""
    return Setting(
        int(properties.get("batch_size", DEFAULT.batch_size)),
        int(properties.get("max_batch_delay", DEFAULT.delay_ms)),
    )


def best_setting(
    rate_of: Callable[[Setting], float], given: Setting, most_sequences: int | None = None
) -> Setting:
    """Try some settings, each once, and return the fastest.

    Tries the given setting first, then all batch sizes with the first delay, then the other delays
    with the best batch size. rate_of: measures the requests/s of a setting. most_sequences: how
    many sequences the clients send at once; a larger batch would never fill.
    """
    rates = {given: rate_of(given)}

    def best_of(settings: Sequence[Setting]) -> Setting:
        for setting in settings:
            if setting not in rates:
                rates[setting] = rate_of(setting)
        return max(settings, key=rates.__getitem__)

    sizes = dict.fromkeys(min(size, most_sequences or size) for size in BATCH_SIZES)
    batch_size = best_of([Setting(size, DELAYS_MS[0]) for size in sizes]).batch_size
    best_of([Setting(batch_size, delay_ms) for delay_ms in DELAYS_MS[1:]])
    return max(rates, key=rates.__getitem__)


def describe(settings: Mapping[str, str]) -> str:
    """Say which batch size and delay a server's properties give to dynamic batching."""
    size, delay = (settings.get(name) for name in ("batch_size", "max_batch_delay"))
    parts = (
        f"batch size {size}" if size else "default batch size",
        f"delay {delay} ms" if delay else "default delay",
    )
    return ", ".join(parts)
