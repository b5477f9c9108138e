"""The signs of life of the server's loop, and the statistics that go with them."""

from __future__ import annotations

from core.protocol.messages import Heartbeat
from core.protocol.stats import Stats
from engine.serve.connection import HEARTBEAT_INTERVAL_S, Connection, Pulse
from engine.serve.host_time import HostTime
from engine.serve.meter import Meter
from engine.serve.service import StepEngine


class Heart:
    """Keeps the pulse of a connection fresh. The loop calls `beat` after each step or wait."""

    def __init__(
        self, engine: StepEngine, connection: Connection, meter: Meter, host_time: HostTime
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._meter = meter
        self._host_time = host_time
        self._stats_due = 0.0
        self._was_idle = True

    def beat(self, now: float) -> Stats:
        """Set the pulse, and return its statistics, which are those of the last heartbeat.

        They are newer if the engine has just become idle; every client then gets them at once.
        Otherwise /metrics would show ended requests until the next heartbeat.
        """
        stats = self._connection.pulse.stats
        is_idle = not self._engine.has_work()
        has_become_idle = is_idle and not self._was_idle
        self._was_idle = is_idle
        if now >= self._stats_due or has_become_idle:
            stats = self._meter.snapshot(self._engine, self._host_time.seconds())
            self._stats_due = now + HEARTBEAT_INTERVAL_S
        self._connection.pulse = Pulse(now, stats)
        if has_become_idle:
            self._connection.broadcast(Heartbeat(0.0, stats))
        return stats
