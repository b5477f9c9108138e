"""Efficiencies from measurements, in place of the assumed ones.

A step that only reads takes `bytes / (bandwidth x efficiency) + overhead`: a straight line through
measured steps gives both. It is fitted by least squares of relative errors, with an efficiency of
at most 1 and an overhead of at least 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulate.cost import Efficiency, Hardware


class CalibrationError(Exception):
    """The file says nothing of this hardware's steps."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A step, on average."""

    num_bytes: float
    seconds: float


def calibrated(path: Path, hardware: Hardware) -> Efficiency:
    """From gpu.json of `make gpu` (its ceilings and roofline), or results.json of the load test.

    hardware: what was measured; of gpu.json only its GPU matters, of results.json its model too.
    Raises CalibrationError for another file, or one without what is needed.
    """
    try:
        found = json.loads(path.read_text())
        if "sections" in found:
            return _of_gpu(found, hardware)
        if "runs" in found:
            return _of_load_test(found, hardware)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path}: {type(error).__name__}: {error}") from error
    raise CalibrationError(f"{path} is neither gpu.json nor results.json of a load test")


def _of_gpu(found: dict[str, Any], hardware: Hardware) -> Efficiency:
    """Measured on one GPU; a step's bytes are in the file, so the model may be another."""
    if found["dry"]:
        raise CalibrationError("a dry run has measured nothing")
    _require_gpu(found["machine"]["gpu"], hardware)
    rows = found["sections"].get("roofline", {"rows": []})["rows"]
    seen = [Observation(row["bytes"], row["step us"] * 1e-6) for row in rows if row["step us"]]
    matmul = found["ceilings"].get("TFLOP/s")
    flops = matmul * 1e12 / hardware.gpu.flops if matmul else hardware.efficiency.flops
    return fitted(seen, hardware.gpu.bandwidth, hardware.efficiency, min(1.0, flops))


def _of_load_test(found: dict[str, Any], hardware: Hardware) -> Efficiency:
    """From the mean step of every whole run of a closed loop that looked inside the server.

    What its prompts take to compute, by the assumed rate, is taken off first. In an open loop the
    machine may have been idle between steps.
    """
    _require_gpu(found["machine"].get("GPU"), hardware)
    busy = [run["measures"] for run in found["runs"] if run["is_whole"] and run["users"]]
    seen = [each for measures in busy if (each := _mean_decode(measures, hardware)) is not None]
    bandwidth = hardware.num_gpus * hardware.gpu.bandwidth
    return fitted(seen, bandwidth, hardware.efficiency, hardware.efficiency.flops)


def _require_gpu(name: str | None, hardware: Hardware) -> None:
    """name: as its driver has it, such as NVIDIA A100-SXM4-40GB."""
    if not all(part in (name or "").lower() for part in hardware.gpu.name.split("-")):
        raise CalibrationError(f"it was measured on {name or 'no GPU'}, not on {hardware.gpu.name}")


def _mean_decode(measures: dict[str, Any], hardware: Hardware) -> Observation | None:
    inside, output = measures["inside"], measures["output_tokens"]
    if not inside["batch"] or not inside["step_s"] or output is None:
        return None
    num_steps = measures["seconds"] / inside["step_s"]
    prompts = measures["num_good"] * measures["prompt_tokens"] / num_steps
    flops = hardware.num_gpus * hardware.gpu.flops * hardware.efficiency.flops
    seconds = inside["step_s"] - 2 * hardware.model.num_parameters * prompts / flops
    num_kv_tokens = inside["batch"] * (measures["prompt_tokens"] + output / 2)
    num_bytes = hardware.model.weight_bytes + num_kv_tokens * hardware.model.kv_bytes_per_token
    return Observation(num_bytes, seconds) if seconds > 0 else None


def fitted(
    seen: Sequence[Observation], bandwidth: float, assumed: Efficiency, flops: float
) -> Efficiency:
    """The line through what was seen; where all have the same bytes, with the assumed overhead.

    bandwidth: bytes per second at an efficiency of 1. Raises CalibrationError without any, or where
    steps were faster than that bandwidth allows.
    """
    if not seen:
        raise CalibrationError("no measured step: section roofline, or closed loops with /metrics")
    if max(each.num_bytes for each in seen) > 1.01 * min(each.num_bytes for each in seen):
        slope, overhead = _line(seen)
    else:
        slope, overhead = _through(seen, assumed.overhead_s), assumed.overhead_s
    if overhead < 0 or slope <= 0:
        slope, overhead = _through(seen, 0.0), 0.0
    if slope * bandwidth < 1:
        slope = 1 / bandwidth
        overhead = sum(each.seconds - slope * each.num_bytes for each in seen) / len(seen)
        if overhead < 0:
            raise CalibrationError("steps were faster than this hardware: name what was measured")
    return Efficiency(bandwidth=1 / (slope * bandwidth), flops=flops, overhead_s=overhead)


def _line(seen: Sequence[Observation]) -> tuple[float, float]:
    """Seconds per byte, and seconds; each observation weighs 1 / seconds²."""
    weights = [each.seconds**-2 for each in seen]
    total = sum(weights)
    pairs = list(zip(weights, seen, strict=True))
    mean_bytes = sum(weight * each.num_bytes for weight, each in pairs) / total
    mean_s = sum(weight * each.seconds for weight, each in pairs) / total
    spread = sum(weight * (each.num_bytes - mean_bytes) ** 2 for weight, each in pairs)
    slope = (
        sum(w * (each.num_bytes - mean_bytes) * (each.seconds - mean_s) for w, each in pairs)
        / spread
    )
    return slope, mean_s - slope * mean_bytes


def _through(seen: Sequence[Observation], overhead_s: float) -> float:
    """Seconds per byte, with this overhead."""
    weights = [each.seconds**-2 for each in seen]
    products = sum(
        weight * (each.seconds - overhead_s) * each.num_bytes
        for weight, each in zip(weights, seen, strict=True)
    )
    squares = sum(w * each.num_bytes**2 for w, each in zip(weights, seen, strict=True))
    return products / squares
