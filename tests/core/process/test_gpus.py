"""Which GPUs a process may use."""

from __future__ import annotations

from pathlib import Path

from core.process.gpus import visible_gpus


def test_visible_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1, GPU-ab"}, tmp_path) == ("1", "GPU-ab")
    for nothing in ("", "-1"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": nothing}, tmp_path) == ()
