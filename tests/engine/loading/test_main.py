"""The engine's process, `python -m engine`: its settings, and its exit code."""

from __future__ import annotations

import os
from contextlib import ExitStack

import msgspec
import pytest

from core.configuration.options import Options, make_options
from core.configuration.task import Task
from core.errors import InsufficientMemoryError
from core.protocol.launch import Launch
from core.protocol.messages import Dead, Heartbeat, Hello, Perform, Performed, Ready
from tests.container.processes import running
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

def lose(model_dir, options, phases, on_lost, rank_address):
    on_lost(InsufficientMemoryError("rank 1: no room"))
    time.sleep(60)

build.build_engine = lose
sys.exit(__main__.main())
"""
"""An engine process that learns that a rank is lost, and then goes on waiting."""


QUITTER = """
import sys, time
from engine import __main__, build

def quit(model_dir, options, phases, on_lost, rank_address):
    while not (model_dir / "may_quit").exists():
        time.sleep(0.01)
    sys.exit(0)

build.build_engine = quit
sys.exit(__main__.main())
"""
"""An engine process in which a library ends the process."""


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
    """In an engine without a handler, a step that sleeps counts as hanging."""
    (tmp_path / "model.py").write_text(SLEEPER)
    launch = Launch(
        model_dir=str(tmp_path),
        endpoint=f"ipc://{short_dir}/engine.sock",
        port=0,
        options=make_options({"cloudwatch_metrics_period": 1}),
        task=Task(kind="handler", name=str(tmp_path / "model.py")),
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    with running(["-m", "engine", str(os.getpid()), str(path), "0"]) as process:
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


def test_clients_learn_that_a_library_ended_the_start(tmp_path, short_dir, clients):
    launch = Launch(
        model_dir=str(tmp_path),
        endpoint=f"ipc://{short_dir}/engine.sock",
        port=0,
        options=Options(),
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    with running(["-c", QUITTER, str(os.getpid()), str(path), "0"]) as process:
        client = clients(launch.endpoint)
        client.send(Hello())
        client.receive(Heartbeat, START_S)
        (tmp_path / "may_quit").touch()
        assert client.receive(Dead, START_S).reason == "SystemExit: 0"
        assert process.wait(START_S) == 1


def test_the_exit_code_is_that_of_the_rank_that_is_lost(tmp_path, short_dir):
    """By this code, the supervisor knows not to restart an engine that cannot fit into memory."""
    launch = Launch(
        model_dir=str(tmp_path),
        endpoint=f"ipc://{short_dir}/engine.sock",
        port=0,
        options=Options(),
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    with running(["-c", LOSER, str(os.getpid()), str(path), "0"]) as process:
        assert process.wait(START_S) == InsufficientMemoryError.exit_code
