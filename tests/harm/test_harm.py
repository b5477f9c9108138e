"""`harm` against stub servers that keep or break the limits, and the findings of `soak`."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tests.harm.__main__ import main
from tests.harm.findings import Usage, count_ends, grown
from tests.harm.harm import Outcome
from tests.harm.neighbours import Attempt, Neighbour, why_wrong
from tests.harm.rows import CLOSED, HELD, ROWS, send

USAGE = Usage(processes=2, rss_bytes=2**29, threads=6, files=40)
FINISH = b'data: {"choices":[{"finish_reason":"length"}]}'
DONE = b"data: [DONE]"
ANSWER = b"HTTP/1.1 %d X\r\nConnection: close\r\n\r\n"
STREAM = (ANSWER % 200) + FINISH + b"\n\n" + DONE + b"\n\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the warm-up, which a stub does not need, and restore pytest's signal handler."""
    monkeypatch.setattr("tests.harm.harm.WARM_UP_S", 0.1)
    monkeypatch.setattr("tests.harm.harm.ALONE_S", 0.2)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


class Stub:
    """Answers pings and streams at once, and hostile requests with `hostile`.

    After a hostile request, it answers nothing for `stuck_s`.
    """

    def __init__(self, listener: socket.socket, hostile: bytes, stuck_s: float) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._hostile = hostile
        self._stuck_s = stuck_s
        self._stuck_until = 0.0
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head, body = _request(connection)
            time.sleep(max(0.0, self._stuck_until - time.monotonic()))
            if head.startswith(b"GET /ping"):
                connection.sendall(ANSWER % 200)
            elif b'"stream": true' in body:
                time.sleep(0.01)
                connection.sendall(STREAM)
            else:
                self._stuck_until = time.monotonic() + self._stuck_s
                connection.sendall(self._hostile)


def _request(connection: socket.socket) -> tuple[bytes, bytes]:
    """Read the head of a request, and the body if its length is given."""
    data = b""
    while b"\r\n\r\n" not in data and (more := connection.recv(65536)):
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    while length and len(body) < int(length[1]) and (more := connection.recv(65536)):
        body += more
    return head, body


@contextmanager
def stub(hostile: bytes, *, stuck_s: float = 0.0) -> Iterator[Stub]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Stub(listener, hostile, stuck_s)


def harm(url: str, out: Path, *arguments: str) -> tuple[int, list[Outcome]]:
    command = ["harm", "--url", url, "--rows", "negative", "--json", str(out / "harm.json")]
    code = main([*command, *arguments])
    return code, msgspec.json.decode((out / "harm.json").read_bytes(), type=list[Outcome])


def test_a_server_that_keeps_the_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub(ANSWER % 400) as server:
        code, (outcome,) = harm(server.url, tmp_path, "--max-ping", "60000")
    assert (code, outcome.row, outcome.status) == (0, "negative chunk size", "400")
    assert (outcome.neighbours_failed, outcome.processes_lost, outcome.broken) == (0, None, [])
    assert outcome.slowdown
    assert "negative chunk size" in capsys.readouterr().out


def test_limits_that_are_broken(tmp_path: Path) -> None:
    with stub(ANSWER % 500, stuck_s=0.4) as server:
        code, (outcome,) = harm(server.url, tmp_path, "--max-ping", "100")
    assert code == 1
    assert outcome.longest_ping_s > 0.1
    assert any("/ping took" in what for what in outcome.broken)
    assert "answer: 500" in outcome.broken


def test_a_server_that_does_not_answer_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harm", "--url", "http://127.0.0.1:1", "--rows", "negative"]) == 1
    assert "does not answer ordinary requests" in capsys.readouterr().err


def test_a_client_goes_on_after_its_connection_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the worker that answers is killed, a connection is lost in one of these ways."""
    monkeypatch.setattr("tests.harm.neighbours.RETRY_S", 0.0)
    errors: list[Exception] = [http.client.IncompleteRead(b"half"), ConnectionResetError("reset")]
    whole = threading.Event()

    def request() -> str:
        if errors:
            raise errors.pop(0)
        whole.set()
        return ""

    client = Neighbour(request)
    assert whole.wait(60)
    client.stop()
    failures = [attempt.failure for attempt in client.attempts[:3]]
    assert [failure.partition(":")[0] for failure in failures] == [
        "IncompleteRead",
        "ConnectionResetError",
        "",
    ]


def test_ends_of_a_row() -> None:
    with stub(b"") as server:
        assert send(server.url, b"x\r\n\r\n", 60.0).status == CLOSED
    with stub(ANSWER % 413) as server:
        assert send(server.url, b"x\r\n\r\n", 60.0).status == "413"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert send(url, b"x", 0.1).status == HELD


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) > 20


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([FINISH, DONE], ""),
        ([DONE], "0 finish reasons and 1 ends"),
        ([FINISH, FINISH, DONE], "2 finish reasons"),
        ([FINISH, DONE, DONE], "2 ends"),
        ([DONE, FINISH], "1 finish reasons and 1 ends"),
        ([FINISH], "0 ends"),
        ([b'data: {"error":{"message":"no"}}', DONE], "no"),
        ([], "0 finish reasons"),
    ],
)
def test_a_stream_has_one_end(lines: list[bytes], why: str) -> None:
    found = why_wrong(lines)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, None),
        ({"rss_bytes": 2**30}, "engine: memory grew from 2 processes, 512 MiB"),
        ({"rss_bytes": 2**29 + 2**26}, None),
        ({"files": 57}, "engine: open files grew"),
        ({"threads": 15}, "engine: threads grew"),
        ({"processes": 1}, "engine: 2 processes, 512 MiB, 6 threads, 40 files -> 1 processes"),
    ],
)
def test_a_soak_finds_what_has_grown(change: dict[str, int], found: str | None) -> None:
    broken = grown({"engine": USAGE}, {"engine": msgspec.structs.replace(USAGE, **change)})
    assert len(broken) == (found is not None)
    assert "".join(broken).startswith(found or "")


def test_a_soak_finds_a_role_that_is_missing() -> None:
    (broken,) = grown({"worker": USAGE}, {"engine": USAGE})
    assert broken.startswith("worker: 2 processes")
    assert broken.endswith("-> none")


@pytest.mark.parametrize(
    ("attempt", "ends", "broken"),
    [
        (Attempt(1.0, 2.0, ""), {"whole": 1}, []),
        (Attempt(1.0, 5.5, "gone"), {"failed in an outage": 1}, []),
        (Attempt(6.5, 9.0, "gone"), {"failed in an outage": 1}, []),
        (Attempt(1.0, 4.5, "gone"), {"failed": 1}, ["a request failed without a kill: gone"]),
        (Attempt(7.5, 9.0, "gone"), {"failed": 1}, ["a request failed without a kill: gone"]),
        (
            Attempt(5.0, 6.0, "2 finish reasons and 1 ends in 9 records"),
            {"failed in an outage": 1},
            ["an answer did not end exactly once: 2 finish reasons and 1 ends in 9 records"],
        ),
    ],
)
def test_a_request_may_fail_only_in_an_outage(
    attempt: Attempt, ends: dict[str, int], broken: list[str]
) -> None:
    assert count_ends([attempt], [(5.0, 7.0)]) == (ends, broken)
