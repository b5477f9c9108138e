"""Calibrating the simulator's efficiencies from files of measurements."""

from __future__ import annotations

import json

import pytest

from benchmarks.simulate.calibration import (
    CalibrationError,
    Observation,
    calibrated,
    fitted,
)
from benchmarks.simulate.cost import GPUS, MODELS, Efficiency, Hardware

ASSUMED = Efficiency(bandwidth=0.8, flops=0.6, overhead_s=0.003)
H200 = Hardware(MODELS["llama-2-7b"], GPUS["h200"], 1, ASSUMED)


def line(efficiency, overhead_s, *sizes):
    return [Observation(size, size / (1e12 * efficiency) + overhead_s) for size in sizes]


def test_the_fit_recovers_the_parameters_of_a_line():
    found = fitted(line(0.7, 0.002, 1e10, 3e10, 2e10), 1e12, ASSUMED, 0.5)
    assert found.bandwidth == pytest.approx(0.7)
    assert found.overhead_s == pytest.approx(0.002)
    assert found.flops == 0.5


def test_a_single_size_keeps_the_assumed_overhead():
    found = fitted(line(0.7, 0.003, 1e10, 1e10), 1e12, ASSUMED, 0.5)
    assert (found.bandwidth, found.overhead_s) == (pytest.approx(0.7), 0.003)


def test_overheads_are_not_negative_and_efficiencies_at_most_one():
    steep = [Observation(1e10, 0.010), Observation(2e10, 0.040)]
    found = fitted(steep, 1e12, ASSUMED, 0.5)
    assert found.overhead_s == 0.0
    assert 0 < found.bandwidth <= 1
    flat = [Observation(1e10, 0.100), Observation(2e10, 0.101)]
    found = fitted(flat, 1e12, ASSUMED, 0.5)
    assert found.bandwidth == 1.0
    assert found.overhead_s == pytest.approx((0.090 + 0.081) / 2)
    falling = [Observation(1e10, 0.101), Observation(2e10, 0.100)]
    assert 0 < fitted(falling, 1e12, ASSUMED, 0.5).bandwidth <= 1
    with pytest.raises(CalibrationError, match="faster than this hardware"):
        fitted([Observation(1e10, 0.001)], 1e12, ASSUMED, 0.5)
    with pytest.raises(CalibrationError, match="no measured step"):
        fitted([], 1e12, ASSUMED, 0.5)


def gpu_json(**changes):
    rows = [
        {"batch": batch, "bytes": size, "step us": size / (4800e9 * 0.75) * 1e6 + 500}
        for batch, size in ((1, 14e9), (50, 40e9))
    ]
    found = {
        "dry": False,
        "machine": {"gpu": "NVIDIA H200"},
        "ceilings": {"GB/s": 4000.0, "TFLOP/s": 0.7 * 989},
        "sections": {"roofline": {"rows": rows}},
    }
    return found | changes


def written(tmp_path, found):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found))
    return path


def test_calibrating_from_gpu_json(tmp_path):
    found = calibrated(written(tmp_path, gpu_json()), H200)
    assert found.bandwidth == pytest.approx(0.75)
    assert found.overhead_s == pytest.approx(0.0005)
    assert found.flops == pytest.approx(0.7)
    found = calibrated(written(tmp_path, gpu_json(ceilings={})), H200)
    assert found.flops == ASSUMED.flops


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"a": 1}, "no gpu.json of `make gpu`: KeyError: 'dry'"),
        (gpu_json(dry=True), "dry run"),
        (gpu_json(sections={}), "no measured step"),
        (gpu_json(machine={"gpu": "NVIDIA H100 80GB HBM3"}), "measured on NVIDIA H100 80GB HBM3"),
        (gpu_json(machine={"gpu": None}), "no GPU, not on h200"),
        ([], "no gpu.json of `make gpu`: TypeError"),
    ],
)
def test_unusable_files_are_rejected(tmp_path, found, why):
    with pytest.raises(CalibrationError, match=why):
        calibrated(written(tmp_path, found), H200)
