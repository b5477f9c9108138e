"""The file of an advice: forecasts that a later recording can be compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.advise.estimate import Estimate, Outcome
from core.configuration.record import Value
from strategies.factory import StrategySettings

VERSION = 1


class Forecast(msgspec.Struct, frozen=True):
    """How the recorded requests would fare with other options."""

    changes: dict[str, Value]
    """From the recorded options; empty for these."""
    settings: StrategySettings
    estimate: Estimate
    most_sequences: int
    """In a step."""

    @property
    def name(self) -> str:
        if not self.changes:
            return f"recorded options ({self.settings.batching}), computed"
        given = [f"{name}={value}" for name, value in self.changes.items() if name != "batching"]
        return " ".join([self.settings.batching, *given])


class Advice(msgspec.Struct, frozen=True):
    """What was forecast, and all that is needed to compute it for other requests."""

    version: int
    objective: str
    num_users: int | None
    arrivals_per_s: float
    factors: tuple[float, ...]
    """Of the cost model."""
    uncertainty: float
    """Of all times (`FittedCost.uncertainty`)."""
    error: Outcome
    """What the cost model misses of the recording (`estimate.error_of`)."""
    forecasts: list[Forecast]
    """The best one first."""

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Advice:
        """Raises ValueError if the file has no advice of this version."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is no advice of `longshore advise --out`: {error}") from error
        if found.version != VERSION:
            raise ValueError(f"{path} is an advice of version {found.version}, not {VERSION}")
        return found

    def forecast_of(self, settings: StrategySettings) -> tuple[Forecast, Sequence[str]]:
        """Return the forecast for a server's settings, and which of its settings are others.

        Raises ValueError if there is none with the same strategy and limits.
        """
        limited = [
            (forecast, differences(forecast.settings, settings))
            for forecast in self.forecasts
            if forecast.settings.batching == settings.batching
            and forecast.settings.limits == settings.limits
        ]
        if not limited:
            raise ValueError(
                f"the advice has no forecast of {_limits(settings)}; it has: "
                + "; ".join(_limits(forecast.settings) for forecast in self.forecasts)
            )
        return min(limited, key=lambda row: len(row[1]))


def differences(forecast: StrategySettings, later: StrategySettings) -> list[str]:
    """Return the names of the settings that differ."""
    names = (field.name for field in dataclasses.fields(StrategySettings))
    return [name for name in names if getattr(forecast, name) != getattr(later, name)]


def _limits(settings: StrategySettings) -> str:
    limits = settings.limits
    return (
        f"{settings.batching} with up to {limits.max_sequences} sequences and "
        f"{limits.max_step_tokens} tokens a step"
    )
