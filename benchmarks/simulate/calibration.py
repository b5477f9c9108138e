"""Derives efficiencies from measurements, for use in place of the assumed ones.

A memory-bound step takes `bytes / (bandwidth x efficiency) + overhead`, so a straight line through
measured steps gives both unknowns. It is fitted by least squares of relative errors, with an
efficiency of at most 1 and an overhead of at least 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate.cost import Efficiency, Hardware


class CalibrationError(Exception):
    """The file has no usable measurement of this hardware."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Mean bytes read and seconds of a measured step."""

    num_bytes: float
    seconds: float


def calibrated(path: Path, hardware: Hardware) -> Efficiency:
    """Return the efficiency that `make gpu` measured on one GPU. path: its gpu.json.

    The file has the bytes of the steps, so its model may be another one. Raises CalibrationError if
    the GPU differs, the file is of another kind, or it lacks the needed figures.
    """
    try:
        return _from_gpu_benchmark(json.loads(path.read_text()), hardware)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"{path} is no gpu.json of `make gpu`: {type(error).__name__}: {error}"
        ) from error


def _from_gpu_benchmark(found: dict[str, Any], hardware: Hardware) -> Efficiency:
    if found["dry"]:
        raise CalibrationError("gpu.json is from a dry run, which measures nothing")
    _require_gpu(found["machine"]["gpu"], hardware)
    rows = found["sections"].get("roofline", {"rows": []})["rows"]
    observations = [
        Observation(row["bytes"], row["step us"] * 1e-6) for row in rows if row["step us"]
    ]
    matmul = found["ceilings"].get("TFLOP/s")
    flops = matmul * 1e12 / hardware.gpu.flops if matmul else hardware.efficiency.flops
    return fitted(observations, hardware.gpu.bandwidth, hardware.efficiency, min(1.0, flops))


def _require_gpu(name: str | None, hardware: Hardware) -> None:
    """Raise CalibrationError if the file is from a different GPU.

    name: the GPU's name according to its driver, such as NVIDIA A100-SXM4-40GB.
    """
    if not all(part in (name or "").lower() for part in hardware.gpu.name.split("-")):
        raise CalibrationError(f"measured on {name or 'no GPU'}, not on {hardware.gpu.name}")


def fitted(
    observations: Sequence[Observation], bandwidth: float, assumed: Efficiency, flops: float
) -> Efficiency:
    """Fit bandwidth efficiency and overhead to measured steps.

    If all steps read about the same bytes, the assumed overhead is kept. bandwidth: bytes per
    second at an efficiency of 1. Raises CalibrationError if there are no observations, or if the
    steps were faster than that bandwidth allows.
    """
    if not observations:
        raise CalibrationError("no measured steps: needs the roofline section")
    num_bytes = np.array([step.num_bytes for step in observations])
    seconds = np.array([step.seconds for step in observations])

    def slope_with(overhead_s: float) -> float:
        relative = num_bytes / seconds
        return float(relative @ (1 - overhead_s / seconds) / (relative @ relative))

    if max(num_bytes) > 1.01 * min(num_bytes):
        slope, overhead = map(float, np.polyfit(num_bytes, seconds, 1, w=1 / seconds))
    else:
        slope, overhead = slope_with(assumed.overhead_s), assumed.overhead_s
    if overhead < 0 or slope <= 0:
        slope, overhead = slope_with(0.0), 0.0
    if slope * bandwidth < 1:
        slope = 1 / bandwidth
        overhead = float(np.mean(seconds - slope * num_bytes))
        if overhead < 0:
            raise CalibrationError(
                "steps were faster than this hardware allows; check --model, --gpu and --gpus"
            )
    return Efficiency(bandwidth=1 / (slope * bandwidth), flops=flops, overhead_s=overhead)
