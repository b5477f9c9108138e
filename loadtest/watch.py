"""Looks at a server while it is measured: its /metrics, and the processors it takes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

import gevent
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.clients.transport import HttpTransport, SendError

INTERVAL_S = 0.25
GPU_EVERY = 4
"""Looks at /metrics for each at the GPU, which takes long."""
NAMES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_used": "vllm:kv_cache_usage_perc",
    "kv_blocks": "longshore:kv_blocks",
    "kv_block_tokens": "longshore:kv_block_tokens",
    "kv_tokens_filled": "longshore:kv_tokens_filled",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "steps": "longshore:steps_total",
    "step_sequences": "longshore:step_sequences_total",
    "step_tokens": "longshore:step_tokens_total",
    "queue_sum_s": "vllm:request_queue_time_seconds_sum",
    "queue_count": "vllm:request_queue_time_seconds_count",
}


class Sample(msgspec.Struct, kw_only=True):
    """One look. What cannot be seen is missing."""

    at_s: float
    metrics: dict[str, float] = {}
    """By the keys of NAMES."""
    server_cpu: float | None = None
    """Cores in use since the look before."""
    client_cpu: float | None = None
    machine_cpu: float | None = None
    """Of all processes of the machine, where the server runs here."""
    gpu: float | None = None
    """Share of the time in which it was busy."""


class Watch:
    """A greenlet that looks every INTERVAL_S between `start` and `stop`."""

    def __init__(
        self, url: str | None, clock: Callable[[], float], processes: Sequence[psutil.Process] = ()
    ) -> None:
        """processes: of the server, where they run here."""
        self.samples: list[Sample] = []
        self._transport = None if url is None else HttpTransport(url, 5.0)
        self._clock = clock
        client = psutil.Process()
        self._server = _Processors((lambda: sum(map(_of, processes))) if processes else None)
        self._client = _Processors(lambda: _of(client))
        self._machine = _Processors(_of_machine if processes else None)
        self._has_gpu = bool(processes) and shutil.which("nvidia-smi") is not None
        self._greenlet: gevent.Greenlet | None = None

    def start(self) -> None:
        self._greenlet = gevent.spawn(self._run)

    def stop(self) -> None:
        """After a last look."""
        if self._greenlet is not None:
            self._greenlet.kill()
            self._look()
        if self._transport is not None:
            self._transport.close()

    def _run(self) -> None:
        while True:
            self._look()
            gevent.sleep(INTERVAL_S)

    def _look(self) -> None:
        at_s = self._clock()
        looks_at_gpu = self._has_gpu and len(self.samples) % GPU_EVERY == 0
        self.samples.append(
            Sample(
                at_s=at_s,
                metrics=self._metrics(),
                server_cpu=self._server.used(at_s),
                client_cpu=self._client.used(at_s),
                machine_cpu=self._machine.used(at_s),
                gpu=_gpu() if looks_at_gpu else None,
            )
        )

    def _metrics(self) -> dict[str, float]:
        if self._transport is None:
            return {}
        try:
            return parse(self._transport.get("/metrics").decode())
        except (SendError, ValueError):
            return {}


def parse(text: str) -> dict[str, float]:
    """The samples of NAMES, summed over labels."""
    lines = (line for line in text.splitlines() if "_bucket{" not in line)
    keys: Mapping[str, str] = {name: key for key, name in NAMES.items()}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            key = keys.get(sample.name)
            if key is not None:
                found[key] = found.get(key, 0.0) + sample.value
    return found


class _Processors:
    """How many cores are in use, by a clock of processor time."""

    def __init__(self, seconds: Callable[[], float] | None) -> None:
        self._seconds = seconds
        self._last: tuple[float, float] | None = None

    def used(self, at_s: float) -> float | None:
        """Since it was last asked; None the first time, or where there is no clock."""
        if self._seconds is None:
            return None
        before, self._last = self._last, (at_s, self._seconds())
        if before is None or at_s <= before[0]:
            return None
        return max(0.0, (self._last[1] - before[1]) / (at_s - before[0]))


def _of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _of_machine() -> float:
    """All processors' time but what they idle; a guest's is counted as its host's too."""
    times = psutil.cpu_times()._asdict()
    return sum(times.values()) - sum(
        times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")
    )


def _gpu() -> float | None:
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    shares = [float(line) / 100 for line in answer.stdout.split() if line.isdigit()]
    return sum(shares) / len(shares) if shares else None
