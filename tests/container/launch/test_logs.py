"""The log, as text or JSON: it has a line for each request, and each warning once."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from container.http.deadline import ArrivalTimeoutError
from container.http.request_context import MAX_WARNINGS, LoggedWarnings
from container.http.request_log import MAX_BODY_CHARACTERS
from core.process.logs import JSON_START, JsonFormatter, log_event
from tests.container.conftest import Serve
from tests.container.invocations import invoke, stream

LOGGER = "container.http.request_log"


@pytest.fixture(autouse=True)
def levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Return the fields of each logged request, and clear the captured log."""
    found = [record for record in caplog.records if record.name == LOGGER]
    parsed = [json.loads(JsonFormatter().format(record)) for record in found]
    caplog.clear()
    return parsed


def end(response: TestResponse) -> str:
    """Read the whole response and close it, as a server does; return its request id."""
    response.get_data()
    response.close()
    return response.headers["X-Request-Id"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_line_tells_what_a_request_took(
    serve: Serve, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    http = serve(log_requests="true")
    request = stream if streamed else invoke
    id = end(request(http, max_new_tokens=3))
    (line,) = lines(caplog)
    expected = {
        "event": "request", "request": id, "method": "POST", "path": "/invocations",
        "status": 200, "prompt_tokens": 1, "tokens": 3, "level": "info", "logger": LOGGER,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    times = [line["ttft_s"], line["total_s"]]
    assert times == sorted(times)
    assert "body" not in line


def test_refused_requests_have_no_tokens(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    http = serve(log_requests="true")
    end(invoke(http, max_new_tokens=-1))
    end(http.get("/nowhere"))
    logged = lines(caplog)
    assert [(line["path"], line["status"]) for line in logged] == [
        ("/invocations", 400),
        ("/nowhere", 404),
    ]
    assert all("tokens" not in line and "ttft_s" not in line for line in logged)


def test_by_default_no_request_is_logged(
    http: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    end(invoke(http))
    assert lines(caplog) == []


def test_monitors_are_not_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    http = serve(log_requests="true")
    for path in ("/ping", "/health", "/metrics"):
        end(http.get(path))
    assert lines(caplog) == []


def test_prompts_are_logged_only_if_asked(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    http = serve(log_requests="bodies")
    end(invoke(http, "a secret"))
    end(invoke(http, "x" * 2 * MAX_BODY_CHARACTERS))
    first, second = lines(caplog)
    assert json.loads(str(first["body"]))["inputs"] == "a secret"
    assert len(str(second["body"])) == MAX_BODY_CHARACTERS
    end(invoke(serve(log_requests="true"), "a secret"))
    assert "secret" not in json.dumps(lines(caplog))


class LateBody(io.BytesIO):
    """The body of a client that sends too slowly."""

    def readinto(self, buffer: object) -> int:
        raise ArrivalTimeoutError("the body did not arrive in time")


def test_bodies_that_are_not_read_keep_their_status(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    http = serve(log_requests="bodies", max_request_size=100)
    too_large = invoke(http, "x" * 200)
    late = http.post("/invocations", input_stream=LateBody(b"{}"))
    assert [too_large.status_code, late.status_code] == [413, 408]
    end(too_large)
    end(late)
    assert [(line["status"], line["body"]) for line in lines(caplog)] == [(413, ""), (408, "")]


def test_a_warning_is_logged_once_and_sent_always(
    http: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [invoke(http, use_cache=True) for _ in range(3)]
    assert all("use_cache" in answer.headers["X-Longshore-Warning"] for answer in answers)
    assert sum("use_cache" in record.getMessage() for record in caplog.records) == 1


def test_remembered_warnings_are_limited() -> None:
    warned = LoggedWarnings()
    assert all(warned.add(str(number)) for number in range(MAX_WARNINGS))
    assert not warned.add("one more")


def formatted(formatter: logging.Formatter, caplog: pytest.LogCaptureFixture) -> str:
    return formatter.format(caplog.records[-1])


def test_events_are_text_or_json(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("some")
    log_event(logger, "moved", to="there and\nback", seconds=0.5, left=None)
    text = formatted(logging.Formatter("%(message)s"), caplog)
    assert text == 'event=moved to="there and\\nback" seconds=0.5'
    line = formatted(JsonFormatter("one"), caplog)
    assert line.startswith(JSON_START)
    assert json.loads(line) | {"time": ""} == {
        "time": "", "level": "info", "logger": "some", "model": "one", "event": "moved",
        "to": "there and\nback", "seconds": 0.5,
    }  # fmt: skip


def test_an_exception_stays_in_its_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("some").error("it failed", exc_info=sys.exc_info())
    line = formatted(JsonFormatter(), caplog)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed"
    assert json.loads(line)["exception"].endswith("ValueError: wrong")
