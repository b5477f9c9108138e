"""Malformed requests end with one refusal in JSON and smuggle nothing, whatever server runs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.protocol.messages import Submit
from tests.container.fake_engine import FakeEngine
from tests.container.http.test_frontend import write_launch
from tests.container.processes import HANG_S, Caller, running, running_alone, wait_until
from tests.container.raw_requests import ACCEPTED, NEXT, REFUSED


@pytest.fixture(params=["one model", "several models"])
def path(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tokenizer_dir: Path,
    engine: FakeEngine,
    endpoint: str,
    short_dir: Path,
    caller: Caller,
) -> Iterator[bytes]:
    """Start a server. Yields a path whose route reads the body."""
    if request.param == "one model":
        launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port)
        arguments = ["-m", "container.front_end.start", str(os.getpid()), str(launch)]
        started, path = running(arguments), b"/v1/completions"
    else:
        arguments = ["-m", "tests.container.multi_model.run_models", str(caller.port)]
        started, path = running_alone(arguments, short_dir), b"/models"
    with started as process:
        wait_until(caller.is_healthy)
        yield path
        process.terminate()
        assert process.wait(HANG_S) == 0
        assert "Traceback" not in process.communicate()[1]


def exchange(caller: Caller, data: bytes) -> bytes:
    """Send a request and another one; return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", caller.port), timeout=HANG_S) as connection:
        connection.sendall(data + NEXT)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_raw_requests(caller: Caller, path: bytes, engine: FakeEngine) -> None:
    requests = [data for _, data in REFUSED.values()] + [*ACCEPTED.values()]
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda data: exchange(caller, data.replace(b" PATH ", b" %s " % path)), requests
            )
        )
    wrong = [
        (name, answer)
        for (name, (status, _)), answer in zip(REFUSED.items(), answers, strict=False)
        if not _is_refusal(answer, status)
    ]
    wrong += [
        (name, answer)
        for name, answer in zip(ACCEPTED, answers[len(REFUSED) :], strict=True)
        if not answer.startswith(b"HTTP/1.1 200 ") or answer.count(b"HTTP/1.1 404 ") != 1
    ]
    assert [name for name, _ in wrong] == [], wrong
    assert not engine.of_type(Submit)
    assert caller.is_healthy()


def _is_refusal(answer: bytes, status: int) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return (
        head.startswith(b"HTTP/1.1 %d " % status)
        and answer.count(b"\r\n\r\n") == 1
        and b"application/json" in head
        and bool(json.loads(body)["error"])
    )
