"""Samples a server during a run: its /metrics, and CPU and GPU use."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

import gevent
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.servers.clients.transport import HttpTransport, SendError

INTERVAL_S = 0.25
GPU_EVERY = 4
"""The GPU is queried only in every fourth sample, because a query is slow."""
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
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "decode_steps": "longshore:spec_decode_steps_total",
    "steps": "longshore:steps_total",
    "step_sequences": "longshore:step_sequences_total",
    "step_tokens": "longshore:step_tokens_total",
    "host_s": "longshore:host_seconds_total",
    "queue_sum_s": "vllm:request_queue_time_seconds_sum",
    "queue_count": "vllm:request_queue_time_seconds_count",
}
MEANS = ("kv_used", "kv_block_tokens")
"""Values that are averaged over the copies of a model instead of summed."""
DRAFTED = ("drafted", "tried")
"""Decisions of `decode_steps` that gave a step drafts. `drafted_steps` is the sum of these."""


class Sample(msgspec.Struct, kw_only=True):
    """State of the server at one moment; unknown values are missing."""

    at_s: float
    metrics: dict[str, float] = {}
    """Values by the keys of NAMES, and `drafted_steps`."""
    server_cpu: float | None = None
    """Cores used since the previous sample."""
    client_cpu: float | None = None
    machine_cpu: float | None = None
    """Cores used by all processes of the machine, if the server runs on it."""
    gpu: float | None = None
    """GPU utilization, from 0 to 1."""


class ServerWatch:
    """A greenlet that takes a sample every INTERVAL_S between `start` and `stop`."""

    def __init__(
        self, url: str | None, clock: Callable[[], float], processes: Sequence[psutil.Process] = ()
    ) -> None:
        """processes: the server's processes, if they run on this machine."""
        self.samples: list[Sample] = []
        self._transport = None if url is None else HttpTransport(url, 5.0)
        self._clock = clock
        client = psutil.Process()
        self._server = _CpuMeter((lambda: sum(map(_cpu_seconds, processes))) if processes else None)
        self._client = _CpuMeter(lambda: _cpu_seconds(client))
        self._machine = _CpuMeter(_machine_cpu_seconds if processes else None)
        self._has_gpu = bool(processes) and shutil.which("nvidia-smi") is not None
        self._greenlet: gevent.Greenlet | None = None

    def start(self) -> None:
        self._greenlet = gevent.spawn(self._run)

    def stop(self) -> None:
        """Take a last sample and stop."""
        if self._greenlet is not None:
            self._greenlet.kill()
            if self._transport is not None:
                self._transport.close()  # the greenlet's request may have been cut off
            self._sample()
        if self._transport is not None:
            self._transport.close()

    def _run(self) -> None:
        while True:
            self._sample()
            gevent.sleep(INTERVAL_S)

    def _sample(self) -> None:
        at_s = self._clock()
        samples_gpu = self._has_gpu and len(self.samples) % GPU_EVERY == 0
        self.samples.append(
            Sample(
                at_s=at_s,
                metrics=self._metrics(),
                server_cpu=self._server.cores(at_s),
                client_cpu=self._client.cores(at_s),
                machine_cpu=self._machine.cores(at_s),
                gpu=_gpu() if samples_gpu else None,
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
    """Return the metrics of NAMES by key, summed over their labels, or averaged if in MEANS.

    `drafted_steps` are those of DRAFTED.
    """
    lines = (line for line in text.splitlines() if "_bucket{" not in line)
    keys: Mapping[str, str] = {name: key for key, name in NAMES.items()}
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            key = keys.get(sample.name)
            if key is not None:
                found.setdefault(key, []).append(sample.value)
            if key == "decode_steps" and sample.labels.get("decision") in DRAFTED:
                found.setdefault("drafted_steps", []).append(sample.value)
    return {
        key: sum(values) / (len(values) if key in MEANS else 1) for key, values in found.items()
    }


class _CpuMeter:
    """Computes the cores in use from accumulated CPU seconds."""

    def __init__(self, seconds: Callable[[], float] | None) -> None:
        self._seconds = seconds
        self._last: tuple[float, float] | None = None

    def cores(self, at_s: float) -> float | None:
        """Return the mean since the previous call; None on the first call or without a source."""
        if self._seconds is None:
            return None
        before, self._last = self._last, (at_s, self._seconds())
        if before is None or at_s <= before[0]:
            return None
        return max(0.0, (self._last[1] - before[1]) / (at_s - before[0]))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _machine_cpu_seconds() -> float:
    """Return the non-idle seconds of all cores. Guest time is left out: user time includes it."""
    times = psutil.cpu_times()._asdict()
    return sum(times.values()) - sum(
        times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")
    )


def _gpu() -> float | None:
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shares = [float(line) / 100 for line in done.stdout.split() if line.isdigit()]
    return sum(shares) / len(shares) if shares else None
