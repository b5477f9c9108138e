"""`longshore advise`: better options for recorded requests, and whether that was true."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.advise.__main__ import main
from benchmarks.advise.advice import Advice
from benchmarks.advise.estimate import Outcome, estimate, outcome
from benchmarks.advise.objective import Objective
from benchmarks.advise.search import Search
from benchmarks.replay.cost import fitted
from benchmarks.replay.figures import Answer, Tally
from benchmarks.replay.script import script_of
from engine.observers.frames import Arrived
from engine.observers.store import read_recording
from tests.benchmarks.replay.timed import record

LOAD = {"num_blocks": 16, "num_requests": 90}
OBJECTIVE = Objective.parse("ttft=150ms,itl=60ms")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of at most two sequences at once, with blocks for more."""
    folder = tmp_path_factory.mktemp("recording")
    record(folder, **LOAD)
    return folder


@pytest.fixture(scope="module")
def advice(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advice") / "advice.json"
    assert main([str(folder), "--objective", OBJECTIVE.text, "--out", str(path)]) == 0
    return path


def test_better_limits_are_found(advice: Path) -> None:
    best, *others = Advice.read(advice).forecasts
    assert best.settings.batching in ("paged", "continuous")
    assert best.settings.limits.max_sequences > 2
    assert {other.settings.batching for other in others} >= {"none", "dynamic", "paged"}
    recorded = next(other for other in others if not other.changes)
    assert best.estimate.share.value > recorded.estimate.share.value + 0.1
    for forecast in (best, *others):
        for interval in (forecast.estimate.share, forecast.estimate.per_s):
            assert interval.low <= interval.value <= interval.high
            assert interval.low < interval.high


def test_the_answer_has_options_and_what_is_unknown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--objective", OBJECTIVE.text, "--batching", "paged", "--load", "1.2"]
    assert main([str(folder), *given]) == 0
    output = capsys.readouterr().out
    assert "| recorded | " in output
    assert "option.max_rolling_batch_size=" in output
    assert "1.2 times the load" in output
    assert "steps of more than 2 sequences" in output
    assert "continuous" not in output


def test_nothing_better_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--objective", "e2e=100s", "--batching", "none"]) == 0
    assert "No other options that were tried are better." in capsys.readouterr().out


def test_a_forecast_that_comes_true(
    advice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other requests of the same kind, on the same machine."""
    best = next(
        forecast
        for forecast in Advice.read(advice).forecasts
        if forecast.settings.batching == "paged" and forecast.changes
    )
    limits = dataclasses.asdict(best.settings.limits)
    record(tmp_path, **limits, **LOAD, seed=1)
    assert main(["--score", str(tmp_path), str(advice)]) == 0
    output = capsys.readouterr().out
    assert output.count("share yes, requests/s yes") == 2


def test_a_slower_machine_is_a_wrong_forecast(
    advice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, **LOAD, slowness=2.5)
    assert main(["--score", str(tmp_path), str(advice)]) == 1
    assert "share NO" in capsys.readouterr().out


def test_a_recording_without_a_forecast_is_an_error(
    advice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, max_sequences=3, **LOAD)
    with pytest.raises(SystemExit):
        main(["--score", str(tmp_path), str(advice)])
    assert "no forecast of paged with up to 3 sequences" in capsys.readouterr().err
    (tmp_path / "advice.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--score", str(tmp_path), str(tmp_path / "advice.json")])
    assert "is no advice" in capsys.readouterr().err


def test_users_send_when_they_have_an_answer(folder: Path) -> None:
    recording = read_recording(folder)
    cost, script = fitted(recording.frames), script_of(recording.frames, 4)
    for num_users in (1, 5):
        search = Search(recording.header, script, cost, OBJECTIVE, {}, num_users)
        trial = search.trial({"max_rolling_batch_size": 8})
        tally = trial.tally
        assert tally.most_sequences == num_users
        assert sum(answer.num_tokens for answer in tally.answers()) == sum(
            script.num_generated.values()
        )
        # How many come is no chance then, so the rate has no interval of its own.
        found = search.estimate(trial, 0.0, Outcome(0.0, 0.0, 0.0))
        rate = len(tally.answers()) / tally.seconds
        assert found.per_s.high == pytest.approx(found.share.high * rate)
        if num_users == 1:
            assert search.trial({}).share == 1.0  # nobody waits for anybody


@pytest.mark.parametrize(
    ("text", "is_met"),
    [("ttft=1s", True), ("ttft=999ms", False), ("itl=500ms", True), ("itl=0.4s", False),
     ("e2e=3s,ttft=1s", True), ("e2e=3s,ttft=0.5s", False)],
)  # fmt: skip
def test_bounds(text: str, is_met: bool) -> None:
    objective = Objective.parse(text)
    assert objective.is_met(Answer(10.0, 11.0, 13.0, 5)) is is_met
    assert not objective.is_met(Answer(10.0, None, None, 0))


def test_another_bound_is_an_error() -> None:
    with pytest.raises(ValueError, match="ttft=500ms"):
        Objective.parse("ttft=500")


def test_few_answers_make_a_wide_interval() -> None:
    """All of 30 answers met the objective: 27 of 30 later ones may, as Wilson has it."""
    tally = Tally([Arrived(float(id), id, 3, 1, b"", b"") for id in range(30)])
    for id in range(30):
        tally.add(id, id + 0.1, 1)
    objective = Objective.parse("ttft=200ms")
    assert outcome(tally, objective).share == 1.0
    share = estimate([tally] * 3, objective, Outcome(0.0, 0.0, 0.0)).share
    assert share.low == pytest.approx(0.917, abs=0.001)
    assert share.high == 1.0
    assert estimate([tally] * 3, objective, Outcome(0.1, 0.0, 0.0)).share.low == pytest.approx(
        share.low - 0.1
    )
