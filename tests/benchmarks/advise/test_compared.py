"""Forecasts beside what `longshore compare --record` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.advise.compared import main
from benchmarks.replay.figures import Answer
from benchmarks.replay.recorded import recorded_tally
from core.configuration.strategy_table import Batching
from engine.observers.store import RecordingWriter
from tests.benchmarks.replay.recordings import random_asks, record

STRATEGIES: tuple[Batching, ...] = ("none", "dynamic", "continuous", "paged")


def request(answer: Answer, slowness: float) -> dict[str, float]:
    """Return what a client measures that is `slowness` times as far from its answers."""
    assert answer.first_token is not None
    assert answer.last_token is not None
    first, last = answer.first_token - answer.arrived, answer.last_token - answer.arrived
    return {
        "sent_s": answer.arrived,
        "first_s": answer.arrived + slowness * first,
        "finished_s": answer.arrived + slowness * last,
        "gap_s": slowness * (last - first) / max(1, answer.num_tokens - 1),
    }


def write(folder: Path, slowness: float = 1.0) -> None:
    """Write results and recordings of the same requests, as `compare` does."""
    runs: list[dict[str, Any]] = []
    for name in STRATEGIES:
        asks = random_asks(seed=4, count=50, seconds=5)
        recording = record(name, asks, num_blocks=24, max_delay_s=0.1)
        place = folder / "recordings" / name
        writer = RecordingWriter(place, recording.header, 2**20, 3600)
        writer.write(recording.frames, is_idle=True)
        writer.close()
        runs.append(
            {
                "name": name,
                "workload": "chat",
                "users": None,
                "settings": {"option.batching": name, "option.record": str(place)},
                "records": [
                    request(each, slowness) for each in recorded_tally(recording).answers()
                ],
            }
        )
    results = {"objective": {"ttft": 1.0, "itl": 0.1}, "runs": runs}
    (folder / "results.json").write_bytes(msgspec.json.encode(results))


def test_forecasts_of_strategies_that_then_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "Share and requests/s within the intervals: 3 of 3." in output
    assert "`paged`, recorded" in output
    rows = [line.split("|")[2].strip(" `") for line in output.splitlines() if "| `" in line]
    assert [row.split("`")[0] for row in rows][-1] == "none"


def test_wrong_forecasts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, slowness=10)
    assert main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "1 of 3." in output, "nothing within the objective is right for `none`"
    assert "**" in output


def test_results_without_recordings_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"name": "paged", "workload": "aws", "users": 3, "settings": {}, "records": []}
    results = {"objective": {"ttft": 1.0}, "runs": [run]}
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(results))
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "--record" in capsys.readouterr().err
