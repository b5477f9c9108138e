"""`python -m benchmarks.simulate` from the outside."""

from __future__ import annotations

import json

import pytest

from benchmarks.load.lengths import Lengths, read_timed_trace
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.comparison import SystemRow
from benchmarks.simulate.table import table

FAST = ["--duration", "10"]


@pytest.fixture
def command(capsys):
    def run(*arguments):
        main(list(arguments))
        return capsys.readouterr().out

    return run


def cells(text):
    """Return each system's row of the printed table, as a dict by column name."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def test_the_comparison_is_printed_and_written(command, tmp_path):
    out = tmp_path / "out.json"
    text = command(*FAST, "--systems", "orca-max,paged", "--bound", "0.05", "--json", str(out))
    assert text.startswith("SIMULATION: opt-13b on a100-40gb; ")
    assert "no speed was measured" in text
    found = cells(text)
    assert list(found) == ["Orca (Max)", "paged"]
    assert found["Orca (Max)"]["paper, ShareGPT"] == "2.7x to 8x"
    assert float(found["Orca (Max)"]["paged / system"].rstrip("x")) > 1
    written = json.loads(out.read_text())
    assert written["simulation"] is True
    [result] = written["results"]
    for row in result["rows"]:
        assert 0 < row["outcome"]["figures"]["normalized_latency"] <= 0.05


def test_a_file_gets_no_progress_bar(capsys):
    main([*FAST, "--systems", "paged", "--rate", "2"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "gpu", "count", "title"),
    [
        ("opt-13b", "a100-40gb", "1", "opt-13b on a100-40gb"),
        ("opt-66b", "a100-40gb", "4", "opt-66b on 4 x a100-40gb"),
        ("opt-175b", "a100-80gb", "8", "opt-175b on 8 x a100-80gb"),
    ],
)
def test_the_setups_of_the_paper(model, gpu, count, title, command):
    setup = ["--model", model, "--gpu", gpu, "--gpus", count]
    text = command(*setup, "--duration", "10", "--rate", "0.5", "--systems", "paged")
    titles = [line.split(";")[0] for line in text.splitlines() if line.startswith("SIMULATION")]
    assert titles == [f"SIMULATION: {title}"]


def test_one_rate_on_a_fleet(command):
    arguments = [*FAST, "--systems", "paged", "--rate", "4", "--machines", "3"]
    arguments += ["--router", "prefix-aware", "--prefixes", "3", "--prefix-tokens", "64"]
    text = command(*arguments)
    assert ", 3 machines, prefix-aware; " in text
    assert list(cells(text)) == ["paged"]
    assert command(*arguments) == text


def test_a_trace_at_its_own_rate(command, tmp_path):
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{second:02}.1234567,{100 + second},5" for second in range(10)]
    rows[3] = "2023-11-16 18:00:03,5000,5"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    text = command(*FAST, "--systems", "paged", "--trace", str(trace), "--rate", "trace")
    assert "trace.csv (1 requests over 2048 tokens skipped)" in text
    assert float(cells(text)["paged"]["requests/s served"]) == pytest.approx(1.0, rel=0.05)


def test_a_trace_is_sorted_by_time(tmp_path):
    trace = tmp_path / "trace.csv"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    trace.write_text(header + "2023-11-16 18:00:02.5,3,4\n2023-11-16 18:00:00.0000001,1,2\n")
    assert read_timed_trace(trace) == [(0.0, Lengths(1, 2)), (2.5, Lengths(3, 4))]
    trace.write_text(header)
    with pytest.raises(ValueError, match="no rows"):
        read_timed_trace(trace)
    trace.write_text("ContextTokens,GeneratedTokens\n1,2\n")
    with pytest.raises(ValueError, match="no column TIMESTAMP"):
        read_timed_trace(trace)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--systems", "paged,vllm"], "unknown system vllm"),
        (["--rate", "trace"], "--rate trace requires --trace"),
        (["--model", "opt-175b", "--gpu", "a10g"], "use more GPUs"),
        (["--rate", "0"], "must be greater than 0"),
        (["--machines", "0"], "must be at least 1"),
        (["--flops-efficiency", "1.5"], "must be at most 1"),
        (["--calibrate", "nowhere.json"], "nowhere.json"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--prefix-tokens", "3000"], "--prefix-tokens"),
    ],
)
def test_invalid_arguments_are_rejected(command, capsys, arguments, why):
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    assert stopped.value.code == 2
    assert why in capsys.readouterr().err


def test_a_system_that_sustains_no_rate_is_reported():
    lines = table([SystemRow("orca-max", 0.0, None)], is_knee=True)
    assert "| none |" in lines[-1]
