"""`join` runs ranks, and starts them again, until it is stopped or one of them is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from container.__main__ import main
from core.configuration.meeting_point import KEY_VARIABLE
from tests.container.processes import ROOT, free_port, running, wait_until

JOIN = """
import os, sys
from pathlib import Path
from container.launch.join import join
from core.configuration.options import Options

options = Options(device="cpu", tensor_parallel_degree="4", nodes=2, rank_address="10.0.0.1:80")
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(join(options, Path("model"), os.environ, command))
"""
MARK = """
import os, sys
line = " ".join([*sys.argv[1:], os.environ["OMP_NUM_THREADS"]])
os.write(1, f"{line}\\n".encode())  # in one write, as two ranks share the pipe
sys.exit(int(os.environ["EXIT"]))
"""
DEMO = str(ROOT / "models" / "demo")


def variables(monkeypatch, code):
    monkeypatch.setenv(KEY_VARIABLE, "a-key-of-the-tests")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("EXIT", str(code))


def test_ranks_that_end_are_started_again(monkeypatch):
    variables(monkeypatch, 1)
    with running(["-c", JOIN, MARK]) as process:
        lines = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert lines[0] == "2 ranks of 4 on this machine; rank 0 is at 10.0.0.1:80\n"
    assert lines[1:] == [f"--join 10.0.0.1:80 model {process.pid} 1\n"] * 4


def test_join_ends_when_a_rank_is_refused(monkeypatch):
    variables(monkeypatch, 2)
    with running(["-c", JOIN, MARK]) as process:
        assert process.wait(10) == 2


def test_no_rank_outlives_join(monkeypatch):
    variables(monkeypatch, 0)
    with running(["-c", JOIN, "import time; time.sleep(60)"]) as process:
        process.stdout.readline()
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: len(path.read_text().split()) == 2)
        pids = path.read_text().split()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_follow_the_links_to_the_model_themselves(monkeypatch, tmp_path):
    """A link may lead to another model when the next engine starts."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "config.json").write_text("{}")
    (tmp_path / "current").symlink_to("v1")
    paths = []
    monkeypatch.setattr("container.__main__.join", lambda _, path, variables: paths.append(path))
    monkeypatch.chdir(tmp_path)
    properties = tmp_path / "serving.properties"
    properties.write_text("option.model_id=current\n")
    for arguments in (["current"], [f"--properties={properties}"], ["--model-dir=current"]):
        main(["join", *arguments])
    assert paths == [tmp_path / "current"] * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "option.nodes=1: the model is on one machine"),
        (["--nodes=2"], "cannot be divided by option.nodes=2"),
        (["--nodes=2", "--tensor-parallel-degree=2"], "needs option.rank_address=HOST:PORT"),
        (["--nodes=2", "--tensor-parallel-degree=2", "--rank-address=10.0.0.1:80"],
         f"needs the environment variable {KEY_VARIABLE}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["join", "serve"])
def test_missing_flags_and_variables_are_named(command, flags, message, monkeypatch, capsys):
    if command == "serve" and not flags:
        pytest.skip("serve needs no flags")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    port = [f"--port={free_port()}"] if command == "serve" else []
    assert main([command, DEMO, "--device=cpu", *flags, *port]) == 2
    assert message in capsys.readouterr().err


def test_other_tasks_run_on_one_machine(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(KEY_VARIABLE, "a-key-of-the-tests")
    (tmp_path / "model.py").write_text("def handle(inputs):\n    return inputs\n")
    flags = ["--nodes=2", "--tensor-parallel-degree=2", "--rank-address=10.0.0.1:80"]
    port = f"--port={free_port()}"
    assert main(["serve", str(tmp_path), "--device=cpu", *flags, port]) == 2
    assert "runs on one machine; only text generation runs on several" in capsys.readouterr().err


def test_several_models_do_not_span_machines(monkeypatch, capsys, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert main(["join", "--model-dir", str(tmp_path)]) == 2
    assert "join works only for one model" in capsys.readouterr().err
