"""Calibrating the simulator's efficiencies from files of measurements."""

from __future__ import annotations

import json

import pytest

from benchmarks.simulate.cost import GPUS, MODELS, Efficiency, Hardware
from benchmarks.simulate.measured.calibration import (
    CalibrationError,
    Observation,
    calibrated,
    fitted,
)
from loadtest.study.measures import Measures, ServerMeasures
from loadtest.study.results import Results, Run

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


def test_calibrating_from_a_load_test(tmp_path):
    """Two runs of 7B on one H200, with steps computed from the parameters to be found."""
    model, runs = H200.model, []
    for batch in (4, 32):
        num_bytes = model.weight_bytes + batch * (200 + 50) * model.kv_bytes_per_token
        decode_s = num_bytes / (4800e9 * 0.5) + 0.002
        steps, answers = 1000, 80
        prompt_s = 2 * model.num_parameters * answers * 200 / steps / (989e12 * ASSUMED.flops)
        step_s = decode_s + prompt_s
        inside = {"batch": float(batch), "step_s": step_s}
        measures = {"inside": inside, "seconds": steps * step_s, "num_good": answers,
                    "prompt_tokens": 200.0, "output_tokens": 100.0}  # fmt: skip
        runs.append({"is_whole": True, "users": 50, "measures": measures})
    wrong = runs[0]["measures"] | {"seconds": 1.0, "inside": inside | {"step_s": 1.0}}
    unfinished = {"is_whole": False, "users": 50, "measures": wrong}
    open_loop = {"is_whole": True, "users": None, "measures": wrong}
    blind_measures = wrong | {"inside": {"batch": None, "step_s": None}}
    blind = {"is_whole": True, "users": 50, "measures": blind_measures}
    document = {"machine": {"GPU": "NVIDIA H200"}, "runs": [*runs, unfinished, open_loop, blind]}
    found = calibrated(written(tmp_path, document), H200)
    assert found.bandwidth == pytest.approx(0.5)
    assert found.overhead_s == pytest.approx(0.002)
    assert found.flops == ASSUMED.flops


def test_the_load_test_writes_the_fields_that_are_read():
    assert {"runs", "machine"} <= set(Results.__struct_fields__)
    assert {"is_whole", "users", "measures"} <= set(Run.__struct_fields__)
    read = {"inside", "seconds", "num_good", "prompt_tokens", "output_tokens"}
    assert read <= set(Measures.__struct_fields__)
    assert {"batch", "step_s"} <= set(ServerMeasures.__struct_fields__)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"a": 1}, "neither"),
        (gpu_json(dry=True), "dry run"),
        (gpu_json(sections={}), "no measured step"),
        (gpu_json(machine={"gpu": "NVIDIA H100 80GB HBM3"}), "measured on NVIDIA H100 80GB HBM3"),
        ({"machine": {"GPU": "none"}, "runs": []}, "measured on none, not on h200"),
        ({"machine": {}, "runs": []}, "no GPU, not on h200"),
        ({"machine": {"GPU": "H200"}, "runs": []}, "no measured step"),
        ({"machine": {"GPU": "H200"}, "runs": [{"is_whole": True}]}, "KeyError: 'users'"),
        ([], "neither"),
    ],
)
def test_unusable_files_are_rejected(tmp_path, found, why):
    with pytest.raises(CalibrationError, match=why):
        calibrated(written(tmp_path, found), H200)
