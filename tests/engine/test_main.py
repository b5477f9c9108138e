"""The engine's process, `python -m engine`, with the settings that it passes on."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import msgspec
import pytest

from core.errors import InsufficientMemoryError
from core.messages import Heartbeat, Hello, Launch, Perform, Performed, Ready
from core.options import Options
from core.task import Task
from tests.container.processes import ROOT, running
from tests.engine.serve.serving import Client

START_S = 60
SLEEPER = """
import time

def handle(inputs):
    if not inputs.is_empty():
        time.sleep(2.0)
        return b"awake"
"""
LOSER = """
import sys, time
from core.errors import InsufficientMemoryError
from engine import __main__, build

def lose(model_dir, options, phases, on_lost):
    on_lost(InsufficientMemoryError("rank 1: no room"))
    time.sleep(60)

build.build_engine = lose
sys.exit(__main__.main())
"""
"""The engine's process, which loses a rank and then waits for it."""


def run_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S)


def test_help_says_who_runs_it():
    done = run_engine("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: python -m engine [-h] PARENT LAUNCH.json [COPY]" in done.stdout
    assert "`longshore serve MODEL`" in " ".join(done.stdout.split())


@pytest.mark.parametrize("arguments", [(), ("launch.json",), ("1", "launch.json", "first")])
def test_bad_arguments_are_explained(arguments: tuple[str, ...]):
    done = run_engine(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m engine")
    assert "Traceback" not in done.stderr


@pytest.fixture
def clients():
    """Connects clients, which are closed at the end."""
    with ExitStack() as stack:

        def connect(endpoint):
            client = Client(endpoint)
            stack.callback(client.close)
            return client

        yield connect


def test_a_handler_may_sleep_and_metrics_are_written_for_cloudwatch(tmp_path, short_dir, clients):
    """Any other step that sleeps counts as hanging."""
    (tmp_path / "model.py").write_text(SLEEPER)
    launch = Launch(
        model_dir=str(tmp_path),
        endpoint=f"ipc://{short_dir}/engine.sock",
        port=0,
        options=Options(cloudwatch_metrics_period=1),
        task=Task(kind="handler", name=str(tmp_path / "model.py")),
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    with running(["-m", "engine", str(os.getpid()), str(path)]) as process:
        client = clients(launch.endpoint)
        client.send(Hello())
        client.receive(Ready, START_S)
        client.send(Perform("a", b"1"))
        beats = []
        while isinstance(message := client.receive(Heartbeat | Performed), Heartbeat):
            beats.append(message)
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith('{"_aws":') for line in lines)
        process.terminate()
        assert process.wait(START_S) == 0
    assert message.body == b"awake"
    assert max(beat.step_age_s for beat in beats) > 1
    assert {beat.stalled_s for beat in beats} == {0.0}


def test_the_exit_code_is_that_of_the_rank_that_is_lost(tmp_path, short_dir):
    """The supervisor then does not restart an engine that cannot fit into memory."""
    launch = Launch(
        model_dir=str(tmp_path),
        endpoint=f"ipc://{short_dir}/engine.sock",
        port=0,
        options=Options(),
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    with running(["-c", LOSER, str(os.getpid()), str(path)]) as process:
        assert process.wait(START_S) == InsufficientMemoryError.exit_code
