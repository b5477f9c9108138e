"""Fleets on Ray clusters of two nodes, for `make fleet-test`. `make test` skips them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.processes import ROOT, descendants, free_port, wait_until

START_S = 240
"""Two containers that start at the same time take 20 s on two idle cores."""
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed; make fleet-test installs it",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_ray)
            item.add_marker(pytest.mark.timeout(600))
            # Ray's own modules warn of what they will change.
            item.add_marker(pytest.mark.filterwarnings("default"))


@dataclass(frozen=True, slots=True)
class FleetProcess:
    """A running `python -m deploy.fleet serve --local-nodes 2`."""

    process: subprocess.Popen[bytes]
    port: int
    properties: Path
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as response:
            return response.read().decode()

    def post(self, body: object, headers: Mapping[str, str] | None = None) -> dict[str, object]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/invocations", json.dumps(body).encode(), headers or {}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Return a metric by replica, from the samples that have these labels."""
        samples = re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", self.get("/metrics"), re.M)
        found = ((dict(re.findall(r'(\w+)="([^"]*)"', text)), value) for text, value in samples)
        return {
            given["replica"]: float(value)
            for given, value in found
            if labels.items() <= given.items()
        }

    def processes(self, name: bytes) -> list[int]:
        """Return the fleet's processes that have `name` in their command lines."""
        return [pid for pid in descendants(self.process.pid) if name in command_line(pid)]

    def kill_a_node(self) -> None:
        """Kill all processes of the node that is not the head, at once."""
        [node] = (
            pid for pid in self.processes(b"raylet/raylet") if b"--head" not in command_line(pid)
        )
        for pid in (node, *descendants(node)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def update(self, text: str, *flags: str) -> subprocess.Popen[bytes]:
        """Begin a rolling update to properties with this text. The flags replace SCALE."""
        self.properties.write_text(text)
        arguments = ["serve", "--properties", str(self.properties), *(flags or SCALE)]
        return run_fleet(arguments, self.log)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


SCALE = ("--replicas", "2", "--cpus", "0.5")


def run_fleet(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.fleet", *arguments],
            cwd=ROOT, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def demo(batching: str) -> str:
    return f"option.model_id={ROOT / 'models' / 'demo'}\noption.batching={batching}\n"


@contextmanager
def running_fleet(folder: Path, text: str, *scale: str) -> Iterator[FleetProcess]:
    """Run a fleet on two nodes. Its replicas have properties with this text."""
    properties, log, port = folder / "serving.properties", folder / "log", free_port()
    properties.write_text(text)
    arguments = ["serve", "--local-nodes", "2", "--port", str(port), *scale]
    process = run_fleet([*arguments, "--properties", str(properties)], log)
    try:
        wait_until(lambda: _serves(process, log), START_S)
        yield FleetProcess(process, port, properties, log)
    finally:
        process.terminate()
        process.wait(120)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """Two replicas on two nodes of a Ray cluster."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), demo("paged"), *SCALE) as it:
        yield it


def _serves(process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-5000:]
    return "the fleet serves" in log.read_text()
