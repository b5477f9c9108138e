"""Record and summarize traces of a device's work, with torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

T = TypeVar("T")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""The profiler's categories of GPU work."""
HOST_WORK = ("cpu_op",)
"""Used in place of WORK without a GPU; these events nest, so their sum means nothing."""
CUDA_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Interval:
    name: str
    begin_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True, slots=True)
class Trace:
    """Device work and CUDA calls during some steps."""

    work: list[Interval]
    """Work on the device."""
    calls: list[Interval]
    """CUDA calls on the host."""

    def by_name(self) -> list[tuple[str, int, float]]:
        """Return (name, calls, total µs) of the device work, by descending time."""
        found: dict[str, list[float]] = defaultdict(list)
        for interval in self.work:
            found[interval.name].append(interval.us)
        rows = [(name, len(us), sum(us)) for name, us in found.items()]
        return sorted(rows, key=lambda row: -row[2])

    @property
    def waiting_us(self) -> float:
        """Host time in calls that may wait for the device: synchronizations and copies."""
        return sum(call.us for call in self.calls if _may_wait(call.name))

    @property
    def calling_us(self) -> float:
        """Host time in calls that do not wait, such as launches."""
        return sum(call.us for call in self.calls if not _may_wait(call.name))


def record(
    device: torch.device, warm_up: Callable[[], Any], run: Callable[[], T]
) -> tuple[Trace, T]:
    """Trace what `run` launches on the device, without the warm-up; also return its result."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[activity],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            acc_events=True,  # there is one cycle only; torch 2.11 warns without this
        ) as profiler:
            warm_up()
            _synchronize(device)
            profiler.step()
            result = run()
            _synchronize(device)
            profiler.step()
        events = json.loads(path.read_text())["traceEvents"]
    return read(events, WORK if device.type == "cuda" else HOST_WORK), result


def read(events: Iterable[dict[str, Any]], categories: tuple[str, ...] = WORK) -> Trace:
    """Read events in Chrome's trace format, as written by the profiler: `ts` and `dur` in µs."""
    work, calls = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        begin = float(event["ts"])
        interval = Interval(event["name"], begin, begin + float(event["dur"]))
        if event.get("cat") in categories:
            work.append(interval)
        elif event.get("cat") in CUDA_CALLS:
            calls.append(interval)
    return Trace(work, calls)


def busy_us(work: Iterable[Interval]) -> float:
    """Return the time during which at least one interval ran."""
    return sum(end - begin for begin, end in _union(work))


def idle_us(work: Iterable[Interval], num_steps: int) -> tuple[float, float]:
    """Return the idle time (between steps, within steps) from the first begin to the last end.

    A trace does not mark where a step ends, so the num_steps - 1 longest gaps are taken to be
    those between steps. That is an upper bound on the time between steps.

    ```
    work   |###| |####|         |###| |####|         |###| |####|
    gaps      within   between     within   between     within
    ```
    """
    pairs = pairwise(_union(work))
    gaps = sorted((begin - end for (_, end), (begin, _) in pairs), reverse=True)
    return sum(gaps[: num_steps - 1]), sum(gaps[num_steps - 1 :])


def short_name(kernel: str) -> str:
    """Strip the return type, torch's namespaces and the arguments; truncate to 70 characters."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|c10::", "", kernel)
    name = re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", name)
    return name if len(name) <= 70 else f"{name[:69]}…"


def _union(work: Iterable[Interval]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((interval.begin_us, interval.end_us) for interval in work):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _may_wait(call: str) -> bool:
    return "Synchronize" in call or "Memcpy" in call


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
