"""Results of several commands in one report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.study.combination import combined
from loadtest.study.results import Results, Run, read_results
from tests.loadtest.report.known_runs import compared, results, rounds, run, swept


def test_report_redraws_existing_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared().write(tmp_path / "a")
    _second(run("paged", workload="chat")).write(tmp_path / "b")
    out = tmp_path / "out"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    text = (out / "report.html").read_text()
    assert "chat, requests/s" in text
    assert str(out / "report.html") in capsys.readouterr().out


def test_combined_results_name_the_machine_of_each(tmp_path: Path) -> None:
    compared().write(tmp_path / "a")
    chat = _second(run(workload="chat"), machine={"processor": "two", "GPU": "none"})
    chat.write(tmp_path / "b")
    assert main(["report", *_folders(tmp_path), "--out", str(tmp_path / "out")]) == 0
    machine = read_results(tmp_path / "out").machine
    assert machine == {"processor": "one (aws); two (chat)", "GPU": "none"}


def test_a_fact_names_each_workload_once() -> None:
    chat = _second(run("vllm", workload="chat"), machine={"processor": "two"}, command="c")
    machine = combined([compared(), _second(run("vllm")), chat]).machine
    assert machine["processor"] == "one (aws); two (chat)"


def test_the_numbers_of_rounds_continue() -> None:
    one = results(*rounds("paged", 2.0, 2.0))
    found = combined([one, _second(*rounds("paged", 2.0, 2.0), *rounds("vllm", 2.0, 2.0))])
    numbers = [(entry.name, entry.round) for entry in found.runs]
    assert numbers == [*(("paged", at) for at in (1, 2, 3, 4)), ("vllm", 1), ("vllm", 2)]
    assert [entry.round for entry in one.runs] == [1, 2]


def test_sweeps_of_two_servers_are_combined() -> None:
    rates = [run("vllm", rate=rate, users=None) for rate in (1.0, 2.0)]
    found = combined([swept(), _second(*rates, slo=swept().slo)])
    assert [entry.rate for entry in found.runs if entry.name == "vllm"] == [1.0, 2.0]
    assert {entry.round for entry in found.runs} == {1}


def test_different_objectives_are_noted() -> None:
    one = results(run(), objective={"ttft": 1.0})
    found = combined([one, _second(run("vllm"), objective={"ttft": 2.0})])
    assert found.objective == {"ttft": 1.0}
    assert any("different objectives" in note for note in found.notes)


def _second(*runs: Run, **changes: Any) -> Results:
    """Return the results of a second command."""
    return results(*runs, **({"command": "python -m loadtest compare --out y"} | changes))


SLO = swept().slo


@pytest.mark.parametrize(
    ("one", "other", "part"),
    [
        (compared(), compared(), "given twice"),
        (compared(), _second(run(workload="chat"), seed=1), "seed differs: 0 and 1"),
        (compared(), _second(run("vllm"), machine={"processor": "two", "GPU": "none"}),
         "processor differs: one and two"),
        (compared(), _second(run("vllm"), fresh_servers=False),
         "use of servers differs: one per run and one for all runs"),
        (compared(), _second(run("vllm", loop="closed loop: 8 users")),
         "load differs: closed loop: 4 users and closed loop: 8 users"),
        (compared(), _second(run(length_scale=0.25)), "length scale differs: 1.0 and 0.25"),
        (compared(), _second(run(settings={"batch_size": "4"})), "settings differs"),
        (compared(), _second(run("vllm"), slo=SLO), "kind differs: no sweep and a sweep"),
        (swept(), _second(run("vllm")), "kind differs: a sweep and no sweep"),
        (swept(), _second(run("vllm", rate=1.0), slo={"ttft_p99": 1.0}), "(--slo) differs"),
        (swept(), _second(run(workload="chat", rate=4.0), slo=SLO),
         "workload differs: aws and chat"),
    ],
)  # fmt: skip
def test_results_that_do_not_belong_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one: Results, other: Results, part: str
) -> None:
    one.write(tmp_path / "a")
    other.write(tmp_path / "b")
    assert main(["report", *_folders(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"{}", "missing required field"), (b"{", "truncated")],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, reason: str
) -> None:
    file = tmp_path / "some.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["report", str(file), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert str(file) in message
    assert reason in message


def _folders(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "a"), str(tmp_path / "b")]
