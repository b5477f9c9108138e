"""The dry run of `make gpu`, and that what one section breaks is not lost for the others."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.report import Report, table_text
from benchmarks.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "kernels" / "configurations.json"


def test_dry_run_goes_through_every_section_and_takes_no_figure(tmp_path):
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
    for name in ("correctness", "elementwise"):
        assert {row["verdict"] for row in found["sections"][name]["rows"]} == {"ok"}
    for section in SECTIONS.values():
        assert section.title in run.stdout
    proposed = json.loads((tmp_path / "configurations.json").read_text())
    assert proposed["decode"][0]["when"]["kv_bits"] == [16]
    assert TABLE.read_text() == before


def test_unknown_sections_are_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu", "--sections", "decode,speed"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "'speed' is none of" in capsys.readouterr().err


def begin(name):
    return {"event": "begin", "section": name}


def test_a_worker_that_dies_keeps_what_it_found(tmp_path):
    report, lines = Report(is_dry=False), queue.SimpleQueue()
    row = {"event": "row", "row": {"what": "copy", "bytes": 4000, "us": {"torch": 2.0}}}
    end = {"event": "end", "seconds": 1.0}
    for event in (begin("ceilings"), row, end, begin("decode"), row):
        lines.put(json.dumps(event) + "\n")
    lines.put("")
    assert gpu._collect(lines, report, tmp_path) == ("decode", "it died; see above")
    assert report.is_sound("ceilings")
    assert not report.is_sound("decode")
    assert len(report.section("decode")["rows"]) == 1
    assert "unfinished" in report.text()


def test_a_worker_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.05)
    report, lines = Report(is_dry=False), queue.SimpleQueue()
    assert gpu._collect(lines, report, tmp_path) == (None, "it hung")


def test_the_next_worker_takes_up_what_remains(tmp_path, monkeypatch):
    """Each worker here ends with its first section unfinished."""
    monkeypatch.setattr(gpu, "_collect", lambda *_: (started.pop(0), "it died"))
    started = ["decode", "moves"]
    options = type("Options", (), {"dry": True, "out": tmp_path})
    report = Report(is_dry=True)
    remaining = gpu._run_worker(["decode", "prefill", "moves"], report, options)
    assert remaining == ["prefill", "moves"]
    assert gpu._run_worker(remaining, report, options) == []
    assert report.section("decode")["notes"] == ["worker failed: it died"]


def test_rates_are_fractions_of_the_same_run_and_peers_are_ratios(tmp_path):
    report = Report(is_dry=False)
    for event in (
        begin("ceilings"),
        {"event": "row", "row": {"bytes": 4_000_000, "us": {"torch": 1.0}}},
        {"event": "row", "row": {"flop": 8_000_000_000, "us": {"torch": 10.0}}},
        begin("decode"),
        {"event": "row", "row": {"bytes": 6_000_000, "us": {"ours": 2.0, "a": 1.0, "b": None}}},
        begin("prefill"),
        {"event": "row", "row": {"flop": 8_000_000_000, "us": {"ours": 20.0, "a": 30.0}}},
    ):
        report.take(event)
    report.write(tmp_path)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["ceilings"] == {"GB/s": 4000.0, "TFLOP/s": 800.0}
    decode, prefill = (found["sections"][name]["rows"][0] for name in ("decode", "prefill"))
    assert (decode["GB/s"], decode["of copy"], decode["best peer"]) == (3000.0, 0.75, 0.5)
    assert (prefill["TFLOP/s"], prefill["of matmul"], prefill["best peer"]) == (400.0, 0.5, 1.5)
    assert "75%" in report.text()


def test_the_written_table_is_the_table():
    table = json.loads(TABLE.read_text())
    assert json.loads(table_text(table)) == table


def test_budgets_stay_under_five_minutes():
    seconds = sum(s.seconds for name, s in SECTIONS.items() if name != "flashinfer")
    assert seconds < 300
