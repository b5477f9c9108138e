"""How endings are told apart, and the table of kills."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harm.endings import Clients, Ending, classify, count
from tests.harm.kills import Kill, report_lines
from tests.loadtest.conftest import stub  # noqa: F401 - a fixture
from tests.loadtest.stub import Stub, lmi

TOKEN = b'{"index":0,"generated_text":null,"details":null,"token":{"id":1,"text":"a"}}\n'


@pytest.mark.parametrize(
    ("status", "body", "ending"),
    [
        (200, TOKEN + b'{"token":{"id":1},"generated_text":"ab"}\n', ("answered", "")),
        (200, b'{"generated_text":"ab"}', ("answered", "")),
        (
            200,
            TOKEN + b'{"token":{"id":-1,"error_msg":"stopping"},"generated_text":""}\n',
            ("error", "stopping"),
        ),
        (424, b'{"error":"stopping","code":424}', ("error", "stopping")),
        (200, TOKEN, ("cut", "the last record does not end the answer")),
        (200, b'{"token":{"id":1', ("cut", "status 200, and the last line is not a record")),
        (200, b"", ("cut", "status 200, and the last line is not a record")),
    ],
)
def test_endings(status: int, body: bytes, ending: tuple[str, str]) -> None:
    assert classify(status, body) == ending


def test_clients_send_all_requests_and_report_each_end(stub: Stub) -> None:
    def script(path: str, body: dict[str, Any]) -> Iterator[bytes | float]:
        if body["stream"]:
            yield TOKEN  # and the stream ends
        else:
            yield from lmi(path, body)

    stub.script = script
    clients = Clients(stub.server_address[1], num_streams=3, num_whole=2, max_new_tokens=4)
    assert count(clients.wait(60.0)) == {"cut": 3, "answered": 2}


def test_a_request_that_never_ends_is_an_error(stub: Stub) -> None:
    def script(path: str, body: dict[str, Any]) -> Iterator[bytes | float]:
        let_go.wait(60.0)
        yield json.dumps({"generated_text": "late"}).encode()

    let_go = threading.Event()
    stub.script = script
    clients = Clients(stub.server_address[1], num_streams=0, num_whole=1, max_new_tokens=4)
    with pytest.raises(TimeoutError, match="1 requests are still open"):
        clients.wait(0.01)
    let_go.set()
    assert count(clients.wait(60.0)) == {"answered": 1}


def test_the_table_has_a_row_for_each_kind_of_process() -> None:
    error, cut = Ending("error", 10.5, "gone"), Ending("cut", 12.0, "reset")
    kills = [
        Kill("engine", 10.0, [error, error], 4.0),
        Kill("engine", 10.25, [error], 6.0),
        Kill("supervisor", 11.0, [cut], None, num_processes_left=1, num_files_left=2),
    ]
    _, _, engine, supervisor = report_lines(kills)
    assert engine == "| engine | 2 | 0 | 3 | 0 | 0.4, 0.5 | 5.0, 6.0 | 0 | 0 |"
    assert supervisor == "| supervisor | 1 | 0 | 0 | 1 | 1.0, 1.0 | — | 1 | 2 |"
