"""The tools of a section: device, timer, time budget and reporting."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

REPLAYS_MS = 40.0
"""Approximate total time of the replays of one measurement."""
LONG_CALL_MS = 1.0
"""Call duration above which the overhead of a graph replay is negligible."""


class Bench:
    """Measures and reports for one section.

    In a dry run every call is made once on the CPU and nothing is timed.
    """

    def __init__(
        self,
        *,
        is_dry: bool,
        use_flashinfer: bool,
        seconds: float,
        emit: Callable[[dict[str, Any]], None],
        shape: str = "llama-2-7b",
    ) -> None:
        self._use_flashinfer = use_flashinfer
        self.is_dry = is_dry
        self.shape = shape
        self.device = torch.device("cpu" if is_dry else "cuda")
        # float16 in a dry run, for Triton's interpreter.
        self.dtype = torch.float16 if is_dry else torch.bfloat16
        self._deadline = time.monotonic() + seconds
        self._emit = emit
        self._notes: set[str] = set()

    def row(self, **fields: Any) -> None:
        """Report a row of the section's table.

        `us` holds microseconds by implementation, ours first; `bytes` or `flop` is the minimum that
        one call must move or compute.
        """
        self._emit({"event": "row", "row": fields})

    def note(self, text: str) -> None:
        """Report a note under the table, such as a skipped or failed case; repeats are dropped."""
        if text not in self._notes:
            self._notes.add(text)
            self._emit({"event": "note", "text": text})

    def table(self, configurations: dict[str, Any]) -> None:
        """Report a new table of kernel configurations."""
        self._emit({"event": "table", "table": configurations})

    def has_flashinfer(self) -> bool:
        """Return whether FlashInfer is installed and was built in time; False in a dry run."""
        is_enabled = self._use_flashinfer and not self.is_dry
        return is_enabled and importlib.util.find_spec("flashinfer") is not None

    @property
    def seconds_left(self) -> float:
        """Seconds left in the section's time budget; infinite in a dry run."""
        return float("inf") if self.is_dry else self._deadline - time.monotonic()

    def timed(self, figure: Any) -> Any:
        """Return a time-dependent figure, or in a dry run the same structure with None values."""
        if not self.is_dry:
            return figure
        if isinstance(figure, dict):
            return {name: self.timed(value) for name, value in figure.items()}
        return None

    def has_no_time_for(self, name: str) -> bool:
        """Return whether the time budget is used up; if so, note that `name` was skipped."""
        if time.monotonic() < self._deadline:
            return False
        self.note(f"time was up before {name}")
        return True

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return measure(). If it raises, add a note and return None, so other cases still run.

        Its random numbers do not depend on the cases before it.
        """
        torch.manual_seed(0)
        try:
            return measure()
        except Exception as error:
            reason = (str(error).strip() or "no message").splitlines()[0][:160]
            self.note(f"{name} failed: {type(error).__name__}: {reason}")
        # Outside the handler, so that the error is released, and with it the tensors in its frames.
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # raises if the CUDA context is lost, which ends this worker
            torch.cuda.empty_cache()
        return None

    def fits(self, num_bytes: float, name: str) -> bool:
        """Return whether `num_bytes` of GPU memory are free; if not, note that `name` is skipped.

        Always true on a CPU.
        """
        if self.device.type == "cpu":
            return True
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if num_bytes < 0.9 * free:
            return True
        self.note(f"{name} skipped: needs {num_bytes / 2**30:.0f} of {free / 2**30:.0f} GiB")
        return False

    def num_sets(self, num_bytes: int, max_sets: int = 64) -> int:
        """Return how many input sets to rotate among, so that they fill four times the L2 cache.

        num_bytes: size of one set; max_sets: upper limit.
        """
        if self.is_dry:
            return 2
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        return min(max_sets, max(1, -(-4 * l2 // num_bytes)))

    @property
    def num_processors(self) -> int:
        if self.is_dry:
            return 4
        return torch.cuda.get_device_properties(0).multi_processor_count

    def time_us(self, calls: Sequence[Callable[[], Any]]) -> float | None:
        """Return the median microseconds per call over replays of a CUDA graph of the calls.

        Calls that wait for the GPU, as some of torch's do, cannot be captured: they are timed as
        they are, host time included. Returns None in a dry run.
        """
        for call in calls:
            call()
        if self.is_dry:
            return None
        if _waits_for_gpu(calls[0]):
            times = [_elapsed_ms(call) for call in (list(calls) * 8)[: max(8, len(calls))]]
            return statistics.median(times) * 1000
        calls = _graph_calls(calls, _elapsed_ms(calls[0]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        first_ms = statistics.median(_elapsed_ms(graph.replay) for _ in range(3))
        num_replays = max(5, min(50, int(REPLAYS_MS / first_ms)))
        times = [_elapsed_ms(graph.replay) for _ in range(num_replays)]
        return statistics.median(times) / len(calls) * 1000


def _waits_for_gpu(call: Callable[[], Any]) -> bool:
    """Return whether a call synchronizes. A capture of one that does would leave torch unusable."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _graph_calls(calls: Sequence[Callable[[], Any]], call_ms: float) -> list[Callable[[], Any]]:
    """Repeat short calls until there are at least eight, to amortize a replay's overhead.

    Of long calls, keep only as many as fit into a quarter of REPLAYS_MS, but at least one.
    """
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
