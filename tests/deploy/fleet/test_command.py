"""The command line without Ray: its errors come before anything starts."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.fleet.__main__ import main
from longshore.__main__ import main as longshore
from tests.container.processes import HANG_S, ROOT, free_port

SIGNAL_AT_EVERY_LINE = """
import contextlib, signal, sys
from types import SimpleNamespace
from deploy.fleet.__main__ import main

def interrupt(frame, event, argument):
    if event == "line" and signal.getsignal(signal.SIGTERM).__module__ == "core.process.processes":
        signal.raise_signal(signal.SIGTERM)
    return interrupt

def deploy(fleet, port):
    sys.settrace(interrupt)
    sys._getframe(1).f_trace = interrupt

def end():
    sys.settrace(None)
    print("ended")

nothing = lambda *arguments: contextlib.nullcontext()
fleet = SimpleNamespace(cpus_of_node=int)
sys.modules["deploy.fleet.application"] = SimpleNamespace(fleet_of=lambda *_: fleet)
sys.modules["deploy.fleet.local_cluster"] = SimpleNamespace(local_cluster=nothing)
sys.modules["deploy.fleet.deployment"] = SimpleNamespace(
    connected=nothing, deploy=deploy, end=end, wait_for_route=nothing
)
sys.exit(main(["serve", "--local-nodes", "1", *sys.argv[1:]]))
"""

SIGNAL_WHILE_DEPLOYING = """
import contextlib, signal, sys
from types import SimpleNamespace
from deploy.fleet.__main__ import main

@contextlib.contextmanager
def local_cluster(*_):
    signal.signal(signal.SIGTERM, lambda *_: received or received.append(1) or sys.exit(1))
    try:
        if phase == "cluster":
            signal.raise_signal(number)
        yield "address"
    finally:
        signal.raise_signal(number)
        print("cleaned up")

def deploy(fleet, port):
    signal.raise_signal(number)
    print("deployed")

received = []  # Ray's handler exits once, too
number, phase = int(sys.argv[1]), sys.argv[2]
connected = lambda *_: contextlib.nullcontext()
fleet = SimpleNamespace(cpus_of_node=int)
sys.modules["deploy.fleet.application"] = SimpleNamespace(fleet_of=lambda *_: fleet)
sys.modules["deploy.fleet.local_cluster"] = SimpleNamespace(local_cluster=local_cluster)
sys.modules["deploy.fleet.deployment"] = SimpleNamespace(
    connected=connected, deploy=deploy, end=print, wait_for_route=connected
)
sys.exit(main(["serve", "--local-nodes", "1", *sys.argv[3:]]))
"""


@pytest.fixture
def properties(tmp_path: Path) -> Path:
    path = tmp_path / "serving.properties"
    path.write_text("option.batching=paged\n")
    return path


@pytest.mark.parametrize("scale", ["0:2", "3:2", "2", "a:b", "1:"])
def test_a_bad_range_is_explained(scale: str, properties: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--properties", str(properties), "--autoscale", scale]) == 2
    assert f"--autoscale {scale}: expected MIN:MAX, such as 1:4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("option.batching=pagde", "option.batching"), ("option.ssl_certfile=a\noption.ssl_keyfile=b",
     "the nodes of a fleet speak HTTP")],
)  # fmt: skip
def test_bad_properties_are_explained_before_anything_starts(
    text: str, said: str, properties: Path, capsys: pytest.CaptureFixture[str]
):
    properties.write_text(text)
    assert main(["serve", "--properties", str(properties)]) == 2
    assert said in capsys.readouterr().err


def test_missing_properties_are_named(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--properties", "nowhere"]) == 2
    assert "--properties nowhere: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--replicas", "0"], ["--local-nodes", "-1"], ["--cpus", "0"], ["--surge", "101"],
     ["--router", "random"], ["--replicas", "2", "--autoscale", "1:2"],
     ["--address", "auto", "--local-nodes", "2"]],
)  # fmt: skip
def test_flags_are_checked(arguments: list[str], properties: Path):
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--properties", str(properties), *arguments])
    assert exit.value.code == 2


def test_a_local_fleet_ends_by_a_signal_at_any_line(properties: Path):
    """The test replaces Ray, and raises SIGTERM at every line after the deployment.

    The signal's handler interrupts the main thread, so it must not wait for that thread.
    """
    flags = ["--port", str(free_port()), "--properties", str(properties)]
    command = [sys.executable, "-c", SIGNAL_AT_EVERY_LINE, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("stopping; running requests have 30 s to finish\nended\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["cluster", "deploying"])
def test_a_signal_ends_a_local_fleet_that_starts(signum: int, phase: str, properties: Path):
    """The test replaces Ray. A second signal does not disturb the clean-up."""
    flags = ["--port", str(free_port()), "--properties", str(properties)]
    command = [sys.executable, "-c", SIGNAL_WHILE_DEPLOYING, str(int(signum)), phase, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "cleaned up\nstopped before the fleet could serve\n"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_command_says_what_to_install(
    properties: Path, capsys: pytest.CaptureFixture[str]
):
    assert longshore(["fleet", "serve", "--properties", str(properties)]) == 1
    assert "ray is not installed; run: pip install 'longshore[ray]'" in capsys.readouterr().err
