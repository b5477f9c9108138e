"""What a worker knows of an engine from its messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from core.errors import EngineUnavailableError
from core.protocol.facts import Facts
from core.protocol.messages import Heartbeat, Variant
from core.protocol.stats import Stats

UNHEALTHY_SILENCE_S = 4.0
"""An engine that has been silent for this long is not healthy. It may recover."""
MAX_STALLED_S = 2.5
"""If no thread of the engine has run for this long within a step, the step hangs."""
NO_HEARTBEAT = Heartbeat(0.0, Stats())


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine can answer requests now; `reason` says why not."""

    healthy: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine's last known state. A lost engine's state is replaced by that of none."""

    down_reason: str
    """Why there is no engine, where `known_facts` is None."""
    known_facts: Facts | None = None
    """None until the engine is ready."""
    variants: tuple[Variant, ...] = ()
    """The loaded variants of the model, as the engine last reported them."""
    heartbeat: Heartbeat = NO_HEARTBEAT
    num_of_others: int = 0
    """Unfinished requests of other workers, as of the last heartbeat. Counts every answer."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests. It may hang, see `health`."""
        return self.known_facts is not None

    @property
    def facts(self) -> Facts:
        """The settings the engine resolved. Raises EngineUnavailableError while it is not ready."""
        if self.known_facts is None:
            raise EngineUnavailableError(self.down_reason)
        return self.known_facts

    @property
    def stats(self) -> Stats:
        """The engine's counters as of its last heartbeat."""
        return self.heartbeat.stats

    def after(self, heartbeat: Heartbeat, num_own: int) -> EngineState:
        """Return the state after a heartbeat. num_own: this worker's unfinished requests."""
        reported = heartbeat.stats.num_running + heartbeat.stats.num_waiting
        return replace(self, heartbeat=heartbeat, num_of_others=max(0, reported - num_own))

    def health(self, silence_s: float, heartbeat_timeout_s: float) -> Health:
        """Check that the engine is ready, sends heartbeats and completes steps."""
        if not self.is_ready:
            return Health(False, self.down_reason)
        if silence_s >= UNHEALTHY_SILENCE_S:
            return Health(False, f"no heartbeat from the engine for {silence_s:.0f} s")
        stalled_s, age_s = self.heartbeat.stalled_s, self.heartbeat.step_age_s
        if stalled_s >= MAX_STALLED_S:
            stalled = f"no thread has run for {stalled_s:.0f} s"
            return Health(False, f"the engine hangs in a step: {stalled}")
        if age_s >= heartbeat_timeout_s:
            return Health(False, f"the engine is stuck: no step completed for {age_s:.0f} s")
        return Health(True, "")


class Refusals:
    """Refused HTTP requests by reason, which the engine is told at its next heartbeat."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        self._counts[reason] += 1

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)
