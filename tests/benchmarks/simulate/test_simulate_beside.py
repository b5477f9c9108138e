"""A load test's runs, simulated with the step time that was fitted to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.measured.beside import beside
from benchmarks.simulate.measured.calibration import CalibrationError
from benchmarks.simulate.measured.load_test import MeasuredRun, read_runs
from benchmarks.simulate.measured.replay import Replay
from benchmarks.simulate.measured.step_time import StepTime, fitted
from loadtest.study.results import Run
from tests.loadtest.report.known_runs import record, results, run, sample

STEP = StepTime(per_step=0.01, per_sequence=0.001, per_token=0.0001)


def served(
    batching: str = "none",
    counts: tuple[float, float, float] = (10, 10, 20),
    *,
    prompts: tuple[int, ...] = (4, 4),
    due: tuple[float | None, ...] = (None, None),
    answer: int = 3,
    prefix_hits: float = 0.0,
    settings: dict[str, str] | None = None,
    **changes: Any,
) -> Run:
    """Return a run whose steps took exactly the time that STEP gives.

    counts: the number of steps, of their sequences, and of their tokens.
    """
    seconds = sum(
        count * cost
        for count, cost in zip(
            counts, (STEP.per_step, STEP.per_sequence, STEP.per_token), strict=True
        )
    )
    records = [
        record(at, 0.0, seconds, prompt_tokens=prompt, asked_tokens=answer, due_s=due_s)
        for at, (prompt, due_s) in enumerate(zip(prompts, due, strict=True))
    ]
    names = ("steps", "step_sequences", "step_tokens")
    hits = {"prefix_queries": 100.0, "prefix_hits": 100.0 * prefix_hits}
    samples = [
        sample(0.0, **dict.fromkeys((*names, *hits), 0.0)),
        sample(seconds, **dict(zip(names, counts, strict=True)), **hits),
    ]
    values: dict[str, Any] = {
        "users": None if due[0] is not None else 2,
        "settings": {"option.batching": batching, "option.max_model_len": "256"} | (settings or {}),
    }
    return run(batching, records=records, samples=samples, **values | changes)


def read(folder: Path, *runs: Run) -> list[MeasuredRun]:
    results(*runs).write(folder)
    return read_runs(folder)


def seconds(folder: Path, entry: Run) -> float:
    """Return how long the simulated run takes."""
    (measured,) = read(folder, entry)
    return len(measured.requests) / Replay(measured, STEP).predict().requests_per_s


DETERMINED = (
    served("none", (100, 100, 300)),
    served("continuous", (50, 300, 300)),
    served("paged", (40, 400, 2000), workload="chat"),
)


def test_the_step_time_is_found(tmp_path: Path) -> None:
    found = fitted(read(tmp_path, *DETERMINED))
    assert found.per_step == pytest.approx(STEP.per_step)
    assert found.per_sequence == pytest.approx(STEP.per_sequence)
    assert found.per_token == pytest.approx(STEP.per_token)


def test_other_runs_are_not_fitted(tmp_path: Path) -> None:
    others = [
        served("dynamic", (1, 1, 1)),
        served("paged", (1, 1, 1), due=(0.0, 1.0)),
        served("paged", (1, 1, 1), is_whole=False),
        served("paged", (1, 1, 1), variant="all outputs 64 tokens"),
        served("paged", (1, 1, 1), workload="parallel"),
    ]
    for entry in others:
        entry.measures.seconds = 1000.0
    assert fitted(read(tmp_path, *DETERMINED, *others)).per_step == pytest.approx(STEP.per_step)


def test_too_few_runs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="2 closed-loop runs of none, continuous or paged"):
        fitted(read(tmp_path, *DETERMINED[:2], served("dynamic")))


def test_one_request_after_the_other(tmp_path: Path) -> None:
    """Each request is a prefill of 4 tokens and two decodes."""
    expected = 2 * (3 * STEP.per_step + 3 * STEP.per_sequence + 6 * STEP.per_token)
    assert seconds(tmp_path, served("none")) == pytest.approx(expected)


def test_two_users_share_steps(tmp_path: Path) -> None:
    expected = 3 * STEP.per_step + 6 * STEP.per_sequence + 12 * STEP.per_token
    assert seconds(tmp_path, served("continuous")) == pytest.approx(expected)
    (measured,) = read(tmp_path, served("continuous"))
    assert Replay(measured, STEP).predict().batch == 2


def test_a_user_sends_the_next_request_after_its_answer(tmp_path: Path) -> None:
    expected = 2 * (3 * STEP.per_step + 3 * STEP.per_sequence + 6 * STEP.per_token)
    assert seconds(tmp_path, served("continuous", users=1)) == pytest.approx(expected)


def test_requests_of_an_open_loop_arrive_at_their_times(tmp_path: Path) -> None:
    one = 3 * STEP.per_step + 3 * STEP.per_sequence + 6 * STEP.per_token
    assert seconds(tmp_path, served("paged", due=(5.0, 25.0))) == pytest.approx(20 + one)


def test_dynamic_waits_for_its_batch(tmp_path: Path) -> None:
    steps = 3 * STEP.per_step + 6 * STEP.per_sequence + 12 * STEP.per_token
    delay = {"max_batch_delay": "500"}
    full = served("dynamic", settings=delay | {"batch_size": "2"})
    assert seconds(tmp_path, full) == pytest.approx(steps)
    short = served("dynamic", settings=delay | {"batch_size": "3"})
    assert seconds(tmp_path, short) == pytest.approx(0.5 + steps)


def test_hits_of_a_block_or_more_are_a_shared_prefix(tmp_path: Path) -> None:
    """With 40 % of hits, prompts of 64 tokens have 25.6 hits on average.

    This is rounded up to two blocks: the second prompt finds 32 tokens.
    """
    prompts, one = (64, 64), 3 * STEP.per_step + 3 * STEP.per_sequence
    without = served("paged", prompts=prompts, users=1, prefix_hits=0.1)
    expected = 2 * one + (64 + 2) * 2 * STEP.per_token
    assert seconds(tmp_path, without) == pytest.approx(expected)
    shared = served("paged", prompts=prompts, users=1, prefix_hits=0.4)
    assert seconds(tmp_path, shared) == pytest.approx(expected - 32 * STEP.per_token)


def test_the_command_prints_prediction_beside_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, unseen, out = tmp_path / "fit", tmp_path / "unseen", tmp_path / "out.json"
    results(*DETERMINED).write(fit)
    once = served("none", (6, 6, 12))
    slower = served("none", (12, 12, 24), workload="chat")
    results(once, slower).write(unseen)
    main(["--calibrate", str(fit), "--predict", str(unseen), "--json", str(out)])
    text = capsys.readouterr().out
    assert "fitted to 3 runs" in text
    assert "10 ms per step, 1 ms per sequence, 0.1 ms per token" in text
    assert "| aws | none | 29.8 | 29.8 | +0.0% | 1.0 | 1.0 |" in text
    assert "| chat | none | 14.9 | 29.8 | +100.0% | 1.0 | 1.0 |" in text
    assert "mean error of requests/s 50.0%, largest 100.0%" in text
    rows = json.loads(out.read_text())["results"]["rows"]
    assert [row["workload"] for row in rows] == ["aws", "chat"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--calibrate", "EMPTY"], "no readable results of a load test"),
        (["--calibrate", "FIT", "--predict", "EMPTY"], "no readable results of a load test"),
        (
            ["--calibrate", "FIT", "--max-length", "9", "--rate", "2"],
            "leave out --rate, --max-length",
        ),
        (["--predict", "FIT"], "--predict needs --calibrate with a folder"),
    ],
)
def test_unusable_arguments_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    results(*DETERMINED).write(tmp_path / "FIT")
    (tmp_path / "EMPTY").mkdir()
    paths = {name: str(tmp_path / name) for name in ("FIT", "EMPTY")}
    with pytest.raises(SystemExit):
        main([paths.get(argument, argument) for argument in arguments])
    assert why in " ".join(capsys.readouterr().err.split())


def test_runs_that_cannot_be_simulated_are_left_out(tmp_path: Path) -> None:
    never_stepped = served()
    never_stepped.samples[:] = never_stepped.samples[:1]
    assert not read(tmp_path, served(settings={"option.copies": "2"}), never_stepped)
    with pytest.raises(CalibrationError, match="no run that can be simulated"):
        beside(tmp_path, None)


@pytest.mark.parametrize(
    ("gpu", "settings", "device"),
    [("none", {}, "cpu"), ("NVIDIA H200", {}, "cuda"),
     ("NVIDIA H200", {"option.device": "cpu"}, "cpu")],
)  # fmt: skip
def test_the_step_limit_is_that_of_the_servers_device(
    tmp_path: Path, gpu: str, settings: dict[str, str], device: str
) -> None:
    results(served(settings=settings), machine={"GPU": gpu}).write(tmp_path)
    (measured,) = read_runs(tmp_path)
    assert measured.device == device


def test_an_unknown_length_limit_is_an_error(tmp_path: Path) -> None:
    entry = served()
    del entry.settings["option.max_model_len"]
    (measured,) = read(tmp_path, entry)
    with pytest.raises(ValueError, match=r"none on aws: .* option.max_model_len is unknown"):
        Replay(measured, STEP)
