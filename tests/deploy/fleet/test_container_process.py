"""The container of a replica: it starts, answers on its socket, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.configuration.options import make_options
from deploy.fleet.container_process import ContainerEndedError, ContainerProcess
from deploy.fleet.exchange import fetch
from deploy.fleet.http_message import HttpRequest
from deploy.fleet.node_process import threads_of_a_rank
from tests.container.processes import ROOT, descendants, is_gone, wait_until

KEEP = """
import asyncio, sys
from pathlib import Path
from deploy.fleet.container_process import ContainerProcess
container = ContainerProcess(Path(sys.argv[1]))
asyncio.run(container.wait_until_ready())
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def properties(tmp_path: Path) -> Path:
    path = tmp_path / "serving.properties"
    path.write_text(f"option.model_id={ROOT / 'models' / 'demo'}\noption.api_keys_file=keys\n")
    return path


def request(method: str, target: bytes, body: bytes = b"", key: bytes = b"none") -> HttpRequest:
    headers = ((b"host", b"here"), (b"authorization", b"Bearer " + key))
    return HttpRequest(method, target, headers, body)


def test_a_container_answers_on_its_socket_and_asks_for_keys_except_at_ping(properties: Path):
    keys = properties.parent / "keys"
    keys.write_text("secret-key-of-the-test\n")
    properties.write_text(properties.read_text().replace("=keys", f"={keys}"))

    async def run() -> None:
        container = ContainerProcess(properties)
        try:
            await container.wait_until_ready()
            body = b'{"inputs": "ROMEO:", "parameters": {"max_new_tokens": 2}}'
            for target, sent in ((b"/metrics", b""), (b"/invocations", body)):
                method = "POST" if sent else "GET"
                head, _ = await fetch(container.socket, request(method, target, sent))
                assert head.status == 401, target
                head, answer = await fetch(
                    container.socket, request(method, target, sent, b"secret-key-of-the-test")
                )
                assert (head.status, bool(answer)) == (200, True), target
        finally:
            await container.stop()
        assert container.has_ended
        assert not container.socket.parent.exists()

    asyncio.run(run())


def test_a_container_says_that_it_cannot_start(properties: Path):
    async def run() -> None:
        container = ContainerProcess(properties)  # there is no file `keys`
        with pytest.raises(ContainerEndedError, match="exit code 2"):
            await container.wait_until_ready()
        await container.stop()

    asyncio.run(run())


@contextmanager
def replica(properties: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a container, as a replica's process does."""
    with subprocess.Popen(
        [sys.executable, "-c", KEEP, str(properties)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_a_container_ends_with_the_process_that_started_it(properties: Path):
    properties.write_text(properties.read_text().replace("option.api_keys_file=keys\n", ""))
    with replica(properties) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip():  # the container's own lines come first
            pass
        children = descendants(process.pid)
        assert len(children) >= 4, "supervisor, engine, gunicorn and a worker"
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in children))


@pytest.mark.parametrize(
    ("cpus", "copies", "degree", "threads"),
    [
        (8.0, 1, "1", "8"),
        (8.0, 2, "1", "4"),
        (8.0, 2, "2", "2"),
        (2.0, 4, "1", "1"),
        (0.5, 1, "1", "1"),
    ],
)
def test_ranks_share_the_cores_of_their_replica(
    cpus: float, copies: int, degree: str, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.configuration.layout.num_cores", lambda: 32)
    options = make_options({"device": "cpu", "copies": copies, "tensor_parallel_degree": degree})
    for variables in ({}, {"OMP_NUM_THREADS": str(max(1, int(cpus)))}):
        assert threads_of_a_rank(options, cpus, variables) == threads
    assert threads_of_a_rank(options, cpus, {"OMP_NUM_THREADS": "1"}) == "1"
