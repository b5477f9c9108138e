"""What a section measures with: its device, its clock, its way to report."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

REPLAYS_MS = 40.0
"""All replays of one measurement take about that long."""
LONG_CALL_MS = 1.0
"""Beside such a call, what a replay itself costs does not count."""


class Bench:
    """Of one section. In a dry run every call is made once on the CPU and no time is taken."""

    def __init__(
        self,
        *,
        is_dry: bool,
        may_flashinfer: bool,
        seconds: float,
        emit: Callable[[dict[str, Any]], None],
        shape: str = "llama-2-7b",
    ) -> None:
        self._may_flashinfer = may_flashinfer
        self.is_dry = is_dry
        self.shape = shape
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float16 if is_dry else torch.bfloat16  # as Triton's interpreter has it
        self._deadline = time.monotonic() + seconds
        self._emit = emit
        self._notes: set[str] = set()

    def row(self, **fields: Any) -> None:
        """One line of the section's table. `us`: microseconds by implementation, ours first;
        `bytes` or `flop`: what one call moves or computes at least."""
        self._emit({"event": "row", "row": fields})

    def note(self, text: str) -> None:
        """Said once under the table: what was skipped, what failed and why."""
        if text not in self._notes:
            self._notes.add(text)
            self._emit({"event": "note", "text": text})

    def table(self, configurations: dict[str, Any]) -> None:
        """A new configuration table."""
        self._emit({"event": "table", "table": configurations})

    def has_flashinfer(self) -> bool:
        """Whether it is installed and its kernels were built in time."""
        is_wanted = self._may_flashinfer and not self.is_dry
        return is_wanted and importlib.util.find_spec("flashinfer") is not None

    @property
    def seconds_left(self) -> float:
        """Of the section's time; without end in a dry run, which ends by itself."""
        return float("inf") if self.is_dry else self._deadline - time.monotonic()

    def timed(self, figure: Any) -> Any:
        """A figure that depends on time. A dry run takes none: there, all that is in it is None."""
        if not self.is_dry:
            return figure
        if isinstance(figure, dict):
            return {name: self.timed(value) for name, value in figure.items()}
        return None

    def is_over(self, what: str) -> bool:
        """Whether the section's time is up; if so, notes that `what` was skipped."""
        if time.monotonic() < self._deadline:
            return False
        self.note(f"time was up before {what}")
        return True

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """measure(), or None with a note where it raises: no case takes others down with it."""
        try:
            return measure()
        except Exception as error:
            reason = (str(error).strip() or "no message").splitlines()[0][:160]
            self.note(f"{name} failed: {type(error).__name__}: {reason}")
        # The error is gone by now, and with it what its frames held.
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # raises where the device is lost: ends this worker
            torch.cuda.empty_cache()
        return None

    def fits(self, num_bytes: float, what: str) -> bool:
        """Whether so much more memory is there; if not, notes that `what` was skipped."""
        if self.device.type == "cpu":
            return True
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if num_bytes < 0.9 * free:
            return True
        self.note(f"{what} skipped: needs {num_bytes / 2**30:.0f} of {free / 2**30:.0f} GiB")
        return False

    def num_sets(self, num_bytes: int, most: int = 64) -> int:
        """Input sets to rotate among, so that their bytes are four times the L2 cache."""
        if self.is_dry:
            return 2
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        return min(most, max(1, -(-4 * l2 // num_bytes)))

    @property
    def num_processors(self) -> int:
        if self.is_dry:
            return 4
        return torch.cuda.get_device_properties(0).multi_processor_count

    def time_us(self, calls: Sequence[Callable[[], Any]]) -> float | None:
        """Median microseconds of one call, over replays of a CUDA graph of all the calls."""
        for call in calls:
            call()
        if self.is_dry:
            return None
        calls = _as_many_as_fit(calls, _elapsed_ms(calls[0]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        first_ms = statistics.median(_elapsed_ms(graph.replay) for _ in range(3))
        num_replays = max(5, min(50, int(REPLAYS_MS / first_ms)))
        times = [_elapsed_ms(graph.replay) for _ in range(num_replays)]
        return statistics.median(times) / len(calls) * 1000


def _as_many_as_fit(calls: Sequence[Callable[[], Any]], call_ms: float) -> list[Callable[[], Any]]:
    """Short calls eight times at least, to share what a replay costs; long ones fewer times."""
    if call_ms < LONG_CALL_MS:
        return list(calls) * -(-8 // len(calls))
    return list(calls)[: max(1, int(REPLAYS_MS / 4 / call_ms))]


def _elapsed_ms(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
