"""Finds the batch size and delay with which dynamic batching serves a workload best."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

TUNED = "dynamic (tuned)"
"""Name of dynamic batching with the setting that was found."""
BATCH_SIZES = (16, 32, 64)
DELAYS_MS = (100, 10)
"""Longer delays are left out: a batch that does not fill wastes all of them."""


class Setting(msgspec.Struct, frozen=True):
    """Settings of dynamic batching."""

    batch_size: int
    delay_ms: int

    def properties(self) -> dict[str, str]:
        """Return the setting as properties of the server."""
        return {"batch_size": str(self.batch_size), "max_batch_delay": str(self.delay_ms)}


class Trial(msgspec.Struct, kw_only=True):
    """A short run with one setting."""

    workload: str
    settings: dict[str, str]
    """The server's properties."""
    requests_per_s: float


def best_setting(
    rate_of: Callable[[Setting | None], float], most_sequences: int | None = None
) -> Setting | None:
    """Try some settings and return the fastest, or None if it is that of the given properties.

    First the given one, then all batch sizes with the first delay, then the other delays with the
    best batch size. rate_of: measures the requests/s of a setting; None stands for the given one.
    most_sequences: how many the clients send at once; a larger batch would only wait for more.
    """
    given = rate_of(None)
    rates: dict[Setting, float] = {}
    for batch_size in dict.fromkeys(min(size, most_sequences or size) for size in BATCH_SIZES):
        setting = Setting(batch_size, DELAYS_MS[0])
        rates[setting] = rate_of(setting)
    batch_size = max(rates, key=rates.__getitem__).batch_size
    for delay_ms in DELAYS_MS[1:]:
        setting = Setting(batch_size, delay_ms)
        rates[setting] = rate_of(setting)
    best = max(rates, key=rates.__getitem__)
    return best if rates[best] > given else None


def describe(settings: Mapping[str, str]) -> str:
    """Say which batch size and delay a server's properties give to dynamic batching."""
    size, delay = (settings.get(name) for name in ("batch_size", "max_batch_delay"))
    parts = (
        f"batch size {size}" if size else "default batch size",
        f"delay {delay} ms" if delay else "default delay",
    )
    return ", ".join(parts)
