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

from benchmarks.simulate.cost import Efficiency, Hardware


class CalibrationError(Exception):
    """The file has no usable measurement of this hardware."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Mean bytes read and seconds of a measured step."""

    num_bytes: float
    seconds: float


def calibrated(path: Path, hardware: Hardware) -> Efficiency:
    """Return the efficiency measured by `make gpu` (gpu.json) or by the load test (results.json).

    hardware: the GPU and model that were measured. The GPU is checked. The model is not; it only
    matters for results.json. Raises CalibrationError if the GPU differs, the file is of another
    kind, or it lacks the needed figures.
    """
    try:
        found = json.loads(path.read_text())
        if "sections" in found:
            return _from_gpu_benchmark(found, hardware)
        if "runs" in found:
            return _from_load_test(found, hardware)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path}: {type(error).__name__}: {error}") from error
    raise CalibrationError(f"{path} is neither gpu.json nor results.json of a load test")


def _from_gpu_benchmark(found: dict[str, Any], hardware: Hardware) -> Efficiency:
    """Calibrate from steps on one GPU. Their bytes are in the file, so the model may differ."""
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


def _from_load_test(found: dict[str, Any], hardware: Hardware) -> Efficiency:
    """Calibrate from the mean step of each complete closed-loop run with server metrics.

    Open loops are left out, since the machine may have been idle between steps.
    """
    _require_gpu(found["machine"].get("GPU"), hardware)
    closed = [run["measures"] for run in found["runs"] if run["is_whole"] and run["users"]]
    steps = [_mean_decode(measures, hardware) for measures in closed]
    observations = [step for step in steps if step is not None]
    bandwidth = hardware.num_gpus * hardware.gpu.bandwidth
    return fitted(observations, bandwidth, hardware.efficiency, hardware.efficiency.flops)


def _require_gpu(name: str | None, hardware: Hardware) -> None:
    """Raise CalibrationError if the file is from a different GPU.

    name: the GPU's name according to its driver, such as NVIDIA A100-SXM4-40GB.
    """
    if not all(part in (name or "").lower() for part in hardware.gpu.name.split("-")):
        raise CalibrationError(f"measured on {name or 'no GPU'}, not on {hardware.gpu.name}")


def _mean_decode(measures: dict[str, Any], hardware: Hardware) -> Observation | None:
    """Return the mean decode step, less the assumed times of prompts and of sums over GPUs.

    Returns None without step metrics or output token counts.
    """
    inside, output = measures["inside"], measures["output_tokens"]
    if not inside["batch"] or not inside["step_s"] or output is None:
        return None
    num_steps = measures["seconds"] / inside["step_s"]
    prompts = measures["num_good"] * measures["prompt_tokens"] / num_steps
    flops = hardware.num_gpus * hardware.gpu.flops * hardware.efficiency.flops
    seconds = inside["step_s"] - 2 * hardware.model.num_parameters * prompts / flops
    seconds -= hardware.sums_s(inside["batch"] + prompts)
    num_kv_tokens = inside["batch"] * (measures["prompt_tokens"] + output / 2)
    num_bytes = hardware.model.weight_bytes + num_kv_tokens * hardware.model.kv_bytes_per_token
    return Observation(num_bytes, seconds) if seconds > 0 else None


def fitted(
    observations: Sequence[Observation], bandwidth: float, assumed: Efficiency, flops: float
) -> Efficiency:
    """Fit bandwidth efficiency and overhead to measured steps.

    If all steps read about the same bytes, the assumed overhead is kept. bandwidth: bytes per
    second at an efficiency of 1. Raises CalibrationError if there are no observations, or if the
    steps were faster than that bandwidth allows.
    """
    if not observations:
        raise CalibrationError(
            "no measured steps: needs the roofline section, or closed-loop runs with /metrics"
        )
    sizes = [step.num_bytes for step in observations]
    if max(sizes) > 1.01 * min(sizes):
        slope, overhead = _line(observations)
    else:
        slope, overhead = _slope(observations, assumed.overhead_s), assumed.overhead_s
    if overhead < 0 or slope <= 0:
        slope, overhead = _slope(observations, 0.0), 0.0
    if slope * bandwidth < 1:
        slope = 1 / bandwidth
        residuals = [step.seconds - slope * step.num_bytes for step in observations]
        overhead = sum(residuals) / len(residuals)
        if overhead < 0:
            raise CalibrationError(
                "steps were faster than this hardware allows; check --model, --gpu and --gpus"
            )
    return Efficiency(bandwidth=1 / (slope * bandwidth), flops=flops, overhead_s=overhead)


def _line(observations: Sequence[Observation]) -> tuple[float, float]:
    """Return slope (seconds per byte) and intercept (seconds), with weights 1 / seconds²."""
    weights = [step.seconds**-2 for step in observations]
    total = sum(weights)
    pairs = list(zip(weights, observations, strict=True))
    mean_bytes = sum(weight * step.num_bytes for weight, step in pairs) / total
    mean_s = sum(weight * step.seconds for weight, step in pairs) / total
    spread = sum(weight * (step.num_bytes - mean_bytes) ** 2 for weight, step in pairs)
    slope = (
        sum(w * (step.num_bytes - mean_bytes) * (step.seconds - mean_s) for w, step in pairs)
        / spread
    )
    return slope, mean_s - slope * mean_bytes


def _slope(observations: Sequence[Observation], overhead_s: float) -> float:
    """Return the slope in seconds per byte for a fixed intercept."""
    weights = [step.seconds**-2 for step in observations]
    products = sum(
        weight * (step.seconds - overhead_s) * step.num_bytes
        for weight, step in zip(weights, observations, strict=True)
    )
    squares = sum(w * step.num_bytes**2 for w, step in zip(weights, observations, strict=True))
    return products / squares
