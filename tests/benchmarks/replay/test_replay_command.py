"""`longshore replay`: the same schedule, or what another strategy would have done."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from benchmarks.replay.__main__ import main
from benchmarks.replay.cost import Work, fitted
from benchmarks.replay.settings import changed
from engine.observers.store import RecordingWriter, read_recording
from tests.benchmarks.replay.timed import OVERHEAD_S, TOKEN_S, record
from tests.engine.observers.test_store import HEADER


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a paged engine whose steps take a known time."""
    folder = tmp_path_factory.mktemp("recording")
    record(folder)
    return folder


def rows(output: str) -> dict[str, list[float]]:
    """Return the columns of each schedule: requests/s, tokens/s, medians of TTFT, ITL, latency."""
    found = {}
    for line in output.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[1].isdigit():
            found[cells[0]] = [float(cell.split(",")[0]) for cell in cells[2:7]]
    return found


def test_without_options_it_reproduces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    output = capsys.readouterr().out
    assert "is the same, step for step" in output
    assert "60 requests" in output


def test_a_difference_is_an_exit_code(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a strategy that was changed since the recording."""
    frames = read_recording(folder).frames
    changed = dataclasses.replace(HEADER.settings, batching="none")
    header = msgspec.structs.replace(HEADER, settings=changed)
    writer = RecordingWriter(tmp_path, header, 2**20, 3600)
    writer.write(frames, is_idle=True)
    writer.close()
    assert main([str(tmp_path)]) == 1
    assert "is not the same: step " in capsys.readouterr().out


def test_the_cost_model_finds_the_known_times(folder: Path) -> None:
    cost = fitted(read_recording(folder).frames)
    assert cost.median_error < 0.01
    assert abs(cost.total_error) < 0.01
    assert cost.seconds(Work(5, 40, 40, 2)) == pytest.approx(OVERHEAD_S + 5 * TOKEN_S, rel=0.02)


def test_the_recorded_options_are_computed_as_they_were(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And another strategy, or limit, is not: one at a time, requests wait longer."""
    assert main([str(folder), "--batching", "none"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["recorded options, computed"] == pytest.approx(found["recorded"], rel=0.03)
    assert found["batching=none"][2] > 2 * found["recorded"][2]


def test_an_option_of_two_strategies_stays_as_it_is() -> None:
    settings = changed(HEADER.settings, {"batching": "continuous"})
    assert settings.limits == HEADER.settings.limits
    assert changed(HEADER.settings, {"batching": "dynamic"}).limits.max_sequences == 32
    assert changed(HEADER.settings, {"max_rolling_batch_size": 7}).limits.max_sequences == 7


def test_a_larger_batch_has_more_states() -> None:
    most = HEADER.settings.limits.max_sequences
    settings = dataclasses.replace(HEADER.settings, num_states=most + 4)
    for count, num_states in ((most + 20, most + 24), (1, most + 4)):
        assert changed(settings, {"max_rolling_batch_size": count}).num_states == num_states
    assert changed(HEADER.settings, {"max_rolling_batch_size": 99}).num_states == 0


def test_more_load_waits_longer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--load", "3"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["load=3"][0] > found["recorded"][0]
    assert found["load=3"][2] > found["recorded"][2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batching", "page"], "paged"),
        (["--num-kv-blocks", "2"], "option.max_model_len"),
        (["--run", "7"], "no recording"),
        (["--load", "0"], "greater than 0"),
    ],
)
def test_wrong_arguments(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(folder), *arguments])
    assert message in capsys.readouterr().err


def test_other_requests_replace_the_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:{second:02}.0000000,5,3" for second in range(0, 60, 10)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    assert main([str(folder), "--trace", str(trace)]) == 0
    found = rows(capsys.readouterr().out)
    first, later = OVERHEAD_S + 5 * TOKEN_S, OVERHEAD_S + TOKEN_S
    assert found["trace=trace.csv"][2:4] == pytest.approx([first * 1e3, later * 1e3], rel=0.05)


def test_without_a_recording_all_strategies_are_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--rate", "2", "--duration", "20"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("COMPUTED, not measured: llama-3.1-8b on h100")
    found = rows(output)
    assert list(found) == ["none", "dynamic", "continuous", "paged"]
    assert found["none"][2] > found["paged"][2]


def test_without_a_recording_requests_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--rate" in capsys.readouterr().err
