"""The dry run of `make gpu`; a section that fails does not affect the others."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import worker
from benchmarks.gpu.report import Report, table_text
from benchmarks.gpu.sections import (
    SECTIONS,
    jobs_of,
    one_process,
    seconds_of,
)
from benchmarks.gpu.targets import TARGETS, targets_text

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "kernels" / "configurations.json"
START_SECONDS = 6
"""Time for a process to start and load its libraries; not part of the sections' budgets."""
LIMIT_SECONDS = 570
"""Time limit of a whole run, excluding the FlashInfer build."""
TIMED = ("requests/s", "tokens/s", "seconds", "step us", "GPU us", "us/step", "share")
SPREADS = ("TTFT ms", "ITL ms", "set-up s", "GPU idle")


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(600)
def test_the_dry_run_runs_every_section_and_reports_no_times(tmp_path):
    before = TABLE.read_text()
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--write-table", "--out", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["dry"]
    assert found["machine"]["versions"]["torch"]
    assert list(found["sections"]) == list(SECTIONS)
    for name, section in found["sections"].items():
        assert section["rows"] or name == "flashinfer"
        assert not any("failed" in note for note in section["notes"]), section["notes"]
        for row in section["rows"]:
            assert set(row.get("us", {}).values()) <= {None}
            assert {row.get(figure) for figure in TIMED} == {None}
            assert all(
                value is None
                for figure in SPREADS
                for value in row.get(figure, {None: None}).values()
            )
    for name in (
        "correctness",
        "elementwise",
        "sampling",
        "quantized",
        "experts",
        "states",
        "invariant",
    ):
        assert {row["verdict"] for row in found["sections"][name]["rows"]} == {"ok"}
    for name, section in SECTIONS.items():
        assert section.title in run.stdout
        rows = found["sections"][name]["rows"]
        assert not section.cases or [row["case"] for row in rows] == list(section.cases)
    assert found["sections"]["serve"]["notes"][0] == "a tiny model in fp32 on cpu"
    small = {row["case"]: row for row in found["sections"]["small-pool"]["rows"]}
    assert small["paged"]["preemptions"] > 0
    assert small["paged"]["steps"] < small["continuous-max"]["steps"]
    assert small["continuous-oracle"]["KV GiB"]["pool"] == small["paged"]["KV GiB"]["pool"]
    proposed = json.loads((tmp_path / "configurations.json").read_text())
    assert proposed["decode"][0]["when"]["kv_bits"] == [16]
    assert TABLE.read_text() == before


def test_unknown_sections_are_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--sections", "decode,speed"])
    assert "unknown section 'speed'" in capsys.readouterr().err


def begin(job):
    return {"event": "begin", "job": job}


def test_results_of_a_worker_that_dies_are_kept(tmp_path):
    report, lines = Report(is_dry=False), queue.SimpleQueue()
    row = {"event": "row", "row": {"what": "copy", "bytes": 4000, "us": {"torch": 2.0}}}
    end = {"event": "end", "seconds": 1.0}
    for event in (begin("ceilings"), row, end, begin("decode"), row):
        lines.put(json.dumps(event) + "\n")
    lines.put("")
    progress = gpu.collect(lines, report, tmp_path, num_jobs=3)
    assert progress == gpu.Progress(1, "decode", "it died; see above")
    assert report.is_sound("ceilings")
    assert not report.is_sound("decode")
    assert len(report.section("decode")["rows"]) == 1
    assert "unfinished" in report.text()


def test_a_worker_that_hangs_is_given_up(tmp_path):
    report, lines = Report(is_dry=False), queue.SimpleQueue()
    progress = gpu.collect(lines, report, tmp_path, num_jobs=1, grace_s=0.05)
    assert progress == gpu.Progress(0, None, "it hung")


def options_of(tmp_path, *, dry=True):
    settings = {"dry": dry, "out": tmp_path, "shape": "llama-2-7b", "stretch": 1.0}
    return type("Options", (), settings)


def test_the_next_worker_runs_the_remaining_jobs(tmp_path, monkeypatch):
    """The first worker dies during its first section, the second during its last."""
    monkeypatch.setattr(gpu, "collect", lambda *_: progress.pop(0))
    progress = [gpu.Progress(0, "decode", "it died"), gpu.Progress(1, "elementwise", "it died")]
    report = Report(is_dry=True)
    remaining = gpu.run_worker(["decode", "prefill", "elementwise"], report, options_of(tmp_path))
    assert remaining == ["prefill", "elementwise"]
    assert gpu.run_worker(remaining, report, options_of(tmp_path)) == []
    assert report.section("decode")["notes"] == ["worker failed at decode: it died"]


def test_a_worker_that_dies_between_jobs_drops_none(tmp_path, monkeypatch):
    """The next worker takes over, and the run counts as failed."""
    jobs, report, lines = (
        ["elementwise", "quantized", "experts"],
        Report(is_dry=True),
        queue.SimpleQueue(),
    )
    end = {"event": "end", "seconds": 1.0}
    for event in (begin("elementwise"), end):
        lines.put(json.dumps(event) + "\n")
    lines.put("")
    progress = gpu.collect(lines, report, tmp_path, len(jobs))
    assert progress == gpu.Progress(1, None, "it died; see above")
    monkeypatch.setattr(gpu, "collect", lambda *_: progress)
    assert gpu.run_worker(jobs, report, options_of(tmp_path)) == ["quantized", "experts"]
    assert report.section("elementwise")["notes"] == [
        "worker failed after elementwise: it died; see above"
    ]
    assert not report.is_sound("elementwise")


def test_a_worker_that_never_starts_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "collect", lambda *_: gpu.Progress(0, None, "it died"))
    report = Report(is_dry=True)
    assert gpu.run_worker(["elementwise", "quantized"], report, options_of(tmp_path)) == []
    assert report.section("elementwise")["notes"] == ["worker failed before elementwise: it died"]
    assert not report.is_sound("elementwise")


@pytest.mark.parametrize(("sections", "code"), [("elementwise", 0), ("elementwise,quantized", 1)])
def test_a_section_that_never_ran_fails_the_run(tmp_path, monkeypatch, sections, code):
    def run_first_only(remaining, report, options):
        for job in ("ceilings", "elementwise"):
            report.take(begin(job))
            report.take({"event": "end", "seconds": 1.0})
        return []

    monkeypatch.setattr(gpu, "run_worker", run_first_only)
    with pytest.raises(SystemExit) as exit:
        gpu.main(["--sections", sections, "--out", str(tmp_path)])
    assert exit.value.code == code


@pytest.mark.parametrize("sections", ["roofline", "ceilings,roofline"])
def test_every_run_has_the_ceilings_of_its_rates(tmp_path, monkeypatch, sections):
    def run_all(remaining, report, options):
        jobs.append(remaining)
        take(report, "ceilings", {"bytes": 4_000_000, "us": {"torch": 1.0}})
        take(report, "roofline", {"batch": 50, "step us": 2.0, "GPU us": 1.5, "bytes": 4_000_000})
        return []

    jobs = []
    monkeypatch.setattr(gpu, "run_worker", run_all)
    with pytest.raises(SystemExit):
        gpu.main(["--sections", sections, "--out", str(tmp_path)])
    assert jobs == [["ceilings", "roofline"]]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["sections"]["roofline"]["rows"][0]["of roofline"] == 0.5


def test_a_worker_is_done_after_its_last_job(tmp_path):
    report, lines = Report(is_dry=False), queue.SimpleQueue()
    for event in (begin("elementwise"), {"event": "end", "seconds": 1.0}):
        lines.put(json.dumps(event) + "\n")
    assert gpu.collect(lines, report, tmp_path, num_jobs=1, grace_s=0.05) == gpu.Progress(1)


def take(report, job, *rows):
    for event in (begin(job), *({"event": "row", "row": row} for row in rows)):
        report.take(event)


def test_the_targets_table_has_the_worst_figure_of_each_target():
    report = Report(is_dry=False)
    take(report, "ceilings", {"bytes": 4_000_000, "us": {"torch": 1.0}})
    of_fp8 = {"batch": 64, "context": 4096, "block": 16}
    decode = {"batch": 64, "context": 4096, "bytes": 4_000_000}
    take(
        report,
        "decode",
        decode | {"us": {"ours": 1.25, "flashinfer": 1.3}},
        decode | {"us": {"ours": 1.1, "flashinfer": 1.0}},
        decode | {"batch": 1, "us": {"ours": 9.0}},
        *(
            {**of_fp8, "shape": shape, "layout": layout, "kv": kv, "us": {"ours": us}}
            for shape, layout, kv, us in (
                ("32/8/128", "NHD", "bfloat16", 1.0),
                ("32/8/128", "NHD", "float8_e4m3fn", 0.6),
                ("32/32/128", "NHD", "bfloat16", 1.2),
                ("32/32/128", "NHD", "float8_e4m3fn", 0.6),
                ("32/32/128", "HND", "float8_e4m3fn", 9.0),
            )
        ),
    )
    take(report, "profile", {"what": "idle between steps", "share": 0.02})
    idle = [{"graph": 0.01, "eager": 0.5}, {"graph": 0.04, "eager": 0.6}]
    take(report, "mixed", *({"us": {"graph": 1.0}, "GPU idle": shares} for shares in idle))
    take(report, "serve/paged", *({"case": c, "requests/s": r} for c, r in SPEEDS.items()))
    cells = [line.strip("| ").split(" | ") for line in targets_text(report).splitlines()[3:]]
    assert [measured for _, _, measured in cells if measured != "not measured"] == [
        "80% (worst of 2)",
        "0.91× its speed (worst of 2)",
        "0.60 (worst of 2)",
        "2.0%",
        "4.0% (worst of 2)",
        "6.0×",
    ]


SPEEDS = {"paged": 12.0, "generate": 2.0}


@pytest.mark.parametrize(
    ("shape", "found"), [("llama-2-7b", "50%"), ("qwen3-0.6b", "not measured")]
)
def test_the_roofline_target_is_for_the_7b_model(shape, found):
    report = Report(is_dry=False, shape=shape)
    take(report, "ceilings", {"bytes": 4_000_000, "us": {"torch": 1.0}})
    take(report, "roofline", {"batch": 50, "step us": 2.0, "GPU us": 1.5, "bytes": 4_000_000})
    [line] = [line for line in targets_text(report).splitlines() if "`roofline`" in line]
    assert line.endswith(f"| {found} |")


def test_a_run_that_timed_nothing_fills_no_target():
    report = Report(is_dry=True)
    take(report, "profile", {"what": "idle between steps", "share": None})
    take(report, "mixed", {"us": {"graph": None}, "GPU idle": {"graph": None, "eager": None}})
    take(report, "decode", {"batch": 64, "context": 4096, "us": {"ours": None, "sdpa": None}})
    take(report, "roofline", {"batch": 50, "step us": None, "GPU us": None, "bytes": 1})
    lines = targets_text(report).splitlines()[3:]
    assert len(lines) == len(TARGETS)
    assert all(line.endswith("| not measured |") for line in lines)


def test_the_targets_are_those_of_the_documentation():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    table = text.partition("## Targets, on an H200")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ")[:2] for line in table.splitlines() if "|" in line][2:]
    assert rows == [[target.what, target.goal] for target in TARGETS]


def test_rates_are_shares_of_this_runs_ceilings_and_peers_are_ratios(tmp_path):
    report = Report(is_dry=False)
    for event in (
        begin("ceilings"),
        {"event": "row", "row": {"bytes": 4_000_000, "us": {"torch": 1.0}}},
        {"event": "row", "row": {"flop": 8_000_000_000, "us": {"torch": 10.0}}},
        begin("decode"),
        {"event": "row", "row": {"bytes": 6_000_000, "us": {"ours": 2.0, "a": 1.0, "b": None}}},
        begin("prefill"),
        {"event": "row", "row": {"flop": 8_000_000_000, "us": {"ours": 20.0, "a": 30.0}}},
        begin("latents"),
        {"event": "row", "row": {"bytes": 20_000_000, "flop": 8_000_000_000, "us": {"ours": 20.0}}},
    ):
        report.take(event)
    report.write(tmp_path)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["ceilings"] == {"GB/s": 4000.0, "TFLOP/s": 800.0}
    decode, prefill = (found["sections"][name]["rows"][0] for name in ("decode", "prefill"))
    assert (decode["GB/s"], decode["of copy"], decode["best peer"]) == (3000.0, 0.75, 0.5)
    assert (prefill["TFLOP/s"], prefill["of matmul"], prefill["best peer"]) == (400.0, 0.5, 1.5)
    assert "of roofline" not in decode | prefill
    [latents] = found["sections"]["latents"]["rows"]
    assert (latents["of copy"], latents["of matmul"], latents["of roofline"]) == (0.25, 0.5, 0.5)
    assert "75%" in report.text()


def test_the_written_table_can_be_read_back():
    table = json.loads(TABLE.read_text())
    assert json.loads(table_text(table)) == table


def test_each_case_has_its_own_process_except_in_a_dry_run():
    jobs = jobs_of(["elementwise", "quantized", "small-pool", "roofline", "profile", "mixed"])
    processes, left = [], jobs
    while left:
        processes.append(one_process(left, is_dry=False))
        left = left[len(processes[-1]) :]
    assert processes == [
        ["elementwise", "quantized"],
        ["small-pool/paged"],
        ["small-pool/continuous-oracle"],
        ["small-pool/continuous-max"],
        ["roofline", "profile", "mixed"],
    ]
    assert one_process(jobs, is_dry=True) == jobs


def test_a_case_that_dies_ends_no_other_case(tmp_path, monkeypatch):
    report, options = Report(is_dry=False), options_of(tmp_path, dry=False)
    outcomes = [gpu.Progress(0, "serve/paged", "it died"), gpu.Progress(1)]
    monkeypatch.setattr(gpu, "collect", lambda *_: outcomes.pop(0))
    jobs = ["serve/paged", "serve/generate", "serve/none"]
    assert gpu.run_worker(jobs, report, options) == ["serve/generate", "serve/none"]
    assert gpu.run_worker(jobs[1:], report, options) == ["serve/none"]
    row = {"event": "row", "row": {"case": "generate", "requests/s": 2.0}}
    end = {"event": "end", "seconds": 3.0}
    for event in (begin("serve/generate"), row, end, begin("serve/none"), end):
        report.take(event)
    assert report.section("serve")["seconds"] == 6.0
    assert len(report.section("serve")["rows"]) == 1
    assert report.section("serve")["notes"] == ["worker failed at serve/paged: it died"]
    assert not report.is_sound("serve")


def test_failed_cases_are_tolerated_only_in_sections_with_peers():
    report = Report(is_dry=False)
    cases = {"decode": True, "serve/generate": True, "roofline": False, "mixed": False}
    for name, is_sound in cases.items():
        note = {"event": "note", "text": "batch 50 failed: RuntimeError: x"}
        for event in (begin(name), note, {"event": "end", "seconds": 1.0}):
            report.take(event)
        assert report.is_sound(name.split("/")[0]) == is_sound


def test_requests_per_second_are_compared_with_baselines_that_ran():
    report = Report(is_dry=False)
    report.take(begin("serve/paged"))
    for case, rate in (("paged", 24.0), ("generate", 6.0)):
        row = {"case": case, "requests/s": rate, "TTFT ms": {"mean": 5.0, "p50": None}}
        report.take({"event": "row", "row": row})
    assert [more for _, more in report.rows("serve")] == [{"x generate": 4.0}, {"x generate": 1.0}]
    header, paged = (line.split() for line in report.text().splitlines()[1:3])
    assert header == ["case", "requests/s", "TTFT", "ms", "mean/p50", "x", "generate"]
    assert paged == ["paged", "24", "5/-", "4"]


def test_shape_and_stretch_are_passed_to_the_worker(tmp_path, monkeypatch):
    seen = []

    class Worker:
        def __init__(self, **settings):
            seen.append(settings)

        def row(self, **_):
            pass

    monkeypatch.setattr("benchmarks.gpu.bench.Bench", Worker)
    monkeypatch.setattr(
        "benchmarks.gpu.engine.small_pool.run", lambda bench, case: seen.append(case)
    )
    options = worker.parse_arguments(
        ["--dry", "--shape", "qwen3-0.6b", "--stretch", "2", "small-pool/paged"]
    )
    worker.run_job(options.jobs[0], options, lambda _: None)
    settings, case = seen
    assert (settings["shape"], case) == ("qwen3-0.6b", "paged")
    assert settings["seconds"] == 2 * seconds_of("small-pool/paged")


@pytest.mark.parametrize(
    ("gibibytes", "notes"), [(3, ["3.0 GiB of GPU memory are still allocated"]), (0.5, [])]
)
def test_leaked_memory_is_noted(monkeypatch, gibibytes, notes):
    events = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: int(gibibytes * 2**30))
    worker.free_memory(False, events.append)
    worker.free_memory(True, events.append)
    assert [event["text"] for event in events] == notes


def test_all_sections_together_take_less_than_ten_minutes():
    jobs, num_processes = jobs_of(SECTIONS), 0
    seconds = sum(seconds_of(job) for job in jobs if job != "flashinfer")
    while jobs:
        jobs = jobs[len(one_process(jobs, is_dry=False)) :]
        num_processes += 1
    assert seconds + num_processes * START_SECONDS <= LIMIT_SECONDS
    first = list(SECTIONS)[: list(SECTIONS).index("serve")]
    assert sum(seconds_of(job) for job in jobs_of(first) if job != "flashinfer") < 300
