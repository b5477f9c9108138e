"""The recorder of CUDA graphs, on a GPU that is imitated."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.step.cuda_recorder import CudaRecorder


class FakeGpu:
    """Replaces the parts of torch.cuda that a recorder uses. Kernels take time on a fake clock."""

    def __init__(self, monkeypatch):
        self.events, self.modes = [], ["default"]
        self.now = self.busy_until = 0.0
        self.num_streams = 0
        for name, value in {
            "graph_pool_handle": lambda: "pool",
            "Stream": self._new_stream,
            "current_stream": lambda: self,
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.events.append("replay")),
            "graph": self._capture,
            "get_sync_debug_mode": lambda: self.modes[-1],
            "set_sync_debug_mode": self.modes.append,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _new_stream(self):
        self.num_streams += 1
        return self

    def wait_stream(self, other):
        pass

    def synchronize(self):
        self.now = max(self.now, self.busy_until)

    def launch(self, host_seconds, device_seconds):
        self.now += host_seconds
        self.busy_until = max(self.now, self.busy_until) + device_seconds

    @contextmanager
    def _capture(self, graph, pool, stream):
        self.events.append("capture")
        yield


def test_a_warm_up_that_waits_for_the_device_fails_before_the_capture(monkeypatch):
    """A failed capture leaves torch's memory pool open."""
    gpu = FakeGpu(monkeypatch)

    def waits():
        if gpu.modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="synchronizing"):
        recorder.record(waits)
    assert (gpu.events, gpu.modes[-1]) == ([], "default")
    recorder.record(lambda: gpu.events.append(gpu.modes[-1]))()
    assert gpu.events == ["error", "capture", "default", "replay"]


def test_all_graphs_are_captured_on_one_stream(monkeypatch):
    """cuBLAS keeps a workspace for each stream that it has seen, 32 MiB on sm_90."""
    gpu = FakeGpu(monkeypatch)
    recorder = CudaRecorder()
    for _ in range(3):
        recorder.is_launch_bound(lambda: None)
        recorder.record(lambda: None)
    assert gpu.num_streams == 1


@pytest.mark.parametrize(("device_ms", "is_bound"), [(0.5, True), (1, True), (1.5, False)])
def test_a_step_is_launch_bound_if_its_kernels_run_as_fast_as_they_are_launched(
    monkeypatch, device_ms, is_bound
):
    gpu, num_runs = FakeGpu(monkeypatch), 0

    def work():
        nonlocal num_runs
        num_runs += 1
        for _ in range(20):
            gpu.launch(1.0 if num_runs > 1 else 50.0, device_ms)  # the first run compiles

    assert CudaRecorder(clock=lambda: gpu.now).is_launch_bound(work) == is_bound
    assert num_runs == 2
