"""SageMaker's headers, sessions and runtime routes."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from botocore.eventstream import EventStreamBuffer
from flask.testing import FlaskClient

from container.apis.invocations.sessions import SESSION_HEADER, Sessions
from core.errors import OverloadedError, RequestError
from core.protocol.messages import Abort
from tests.container.conftest import Serve, eventually
from tests.container.fake_engine import FakeEngine, fails, stalls

ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"
ASK = {"inputs": "Q"}


@pytest.mark.parametrize(
    ("given", "returned"),
    [("c000b4f9-df62; k=v", True), ("x" * 1024, True), ("x" * 1025, False), ("\u00e9", False)],
)
def test_custom_attributes_are_returned(http: FlaskClient, given: str, returned: bool) -> None:
    for path in ("/invocations", "/v1/chat/completions"):  # also with an error response
        response = http.post(path, json=ASK, headers={ATTRIBUTES: given})
        assert response.headers.get(ATTRIBUTES) == (given if returned else None)
    assert ATTRIBUTES not in http.post("/invocations", json=ASK).headers


@pytest.fixture
def with_sessions(serve: Serve, tmp_path: Path) -> FlaskClient:
    return serve(enable_stateful_sessions=True, sessions_path=str(tmp_path / "sessions"))


def post(http: FlaskClient, body: object, session: str | None = None) -> Any:
    headers = {} if session is None else {SESSION_HEADER: session}
    return http.post("/invocations", json=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "header"), [({"requestType": "NEW_SESSION"}, None), (ASK, "NEW_SESSION")]
)
def test_session_life_cycle(with_sessions: FlaskClient, body: object, header: str | None) -> None:
    opened = post(with_sessions, body, header)
    session, expires = opened.headers[NEW_SESSION].split("; Expires=")
    assert expires.endswith("Z")
    assert str(uuid.UUID(session)) == session, "AWS's standards test for 36 characters"
    assert opened.headers[SESSION_HEADER] == session, "DJL's client reads this header"
    assert opened.get_json() in ({"session_id": session}, {"generated_text": "Hi there"})
    used = post(with_sessions, ASK, session)
    assert used.get_json() == {"generated_text": "Hi there"}
    assert NEW_SESSION not in used.headers
    closed = post(with_sessions, {"requestType": "CLOSE"}, session)
    assert (closed.status_code, closed.headers[CLOSED_SESSION]) == (200, session)
    late = post(with_sessions, ASK, session)
    assert (late.status_code, late.get_json()["field"]) == (400, SESSION_HEADER)
    assert post(with_sessions, ASK).status_code == 200, "requests need no session"


@pytest.mark.parametrize(
    ("body", "session", "field"),
    [
        ({"requestType": "OTHER"}, None, "requestType"),
        ({"requestType": "NEW_SESSION", "inputs": "Q"}, None, "requestType"),
        ({"requestType": "CLOSE"}, None, SESSION_HEADER),
        ({"requestType": "CLOSE"}, str(uuid.UUID(int=0)), SESSION_HEADER),
        (ASK, "../../etc/passwd", SESSION_HEADER),
        (ASK, "", SESSION_HEADER),
    ],
)
def test_invalid_sessions(
    with_sessions: FlaskClient, body: object, session: str | None, field: str
) -> None:
    response = post(with_sessions, body, session)
    assert (response.status_code, response.get_json()["field"]) == (400, field)


def test_sessions_are_disabled_by_default(http: FlaskClient) -> None:
    for body, session in (
        ({"requestType": "NEW_SESSION"}, None),
        (ASK, "NEW_SESSION"),
        (ASK, "abc"),
    ):
        response = post(http, body, session)
        assert response.status_code == 400
        assert "stateful sessions are not enabled" in response.get_json()["error"]
        assert "option.enable_stateful_sessions" in response.get_json()["error"]


def test_unused_sessions_expire(tmp_path: Path) -> None:
    now = 1000.0
    sessions = Sessions(tmp_path, 60, lambda: now)
    kept, end = sessions.open()
    lost, _ = sessions.open()
    assert end == 1060
    now = 1059.0
    sessions.use(kept)
    now = 1061.0
    sessions.use(kept)
    with pytest.raises(RequestError):
        sessions.use(lost)
    sessions.open()
    assert len(os.listdir(tmp_path)) == 2, "expired sessions are removed"


def test_sessions_when_the_clock_is_set(tmp_path: Path) -> None:
    """Several machines may share the directory, so only the wall clock can say what has expired."""
    now = 10_000.0
    sessions = Sessions(tmp_path, 60, lambda: now)
    id, _ = sessions.open()
    now -= 3600
    sessions.use(id)
    assert [path.stat().st_mtime for path in tmp_path.iterdir()] == [now], "it expires as usual"
    now += 3600
    with pytest.raises(RequestError, match="expired; open a new one"):
        sessions.use(id)
    sessions.use(sessions.open()[0])


def test_files_of_others_are_neither_sessions_nor_deleted(tmp_path: Path) -> None:
    """The directory may be /dev/shm, with other programs' files and directories."""
    id = str(uuid.uuid4())
    for name in ("torch_1234", "sem.lock", str(uuid.uuid1()), f"{id}.tmp"):
        (tmp_path / name).touch()
    (tmp_path / str(uuid.uuid4())).write_text("not empty")
    (tmp_path / str(uuid.uuid4())).mkdir()
    (tmp_path / str(uuid.uuid4())).symlink_to(tmp_path / "torch_1234")
    before = set(tmp_path.iterdir())
    for path in before:
        os.utime(path, (0, 0), follow_symlinks=False)
    sessions = Sessions(tmp_path, 60, max_sessions=1)
    opened, _ = sessions.open()
    with pytest.raises(OverloadedError):
        sessions.open()
    for path in before:
        with pytest.raises(RequestError):
            sessions.close(path.name)
    sessions.close(opened)
    sessions.open()
    assert before < set(tmp_path.iterdir())


def test_the_number_of_sessions_is_limited(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, 60, max_sessions=2)
    for _ in range(2):
        sessions.open()
    with pytest.raises(OverloadedError):
        sessions.open()


@pytest.fixture
def runtime(serve: Serve) -> FlaskClient:
    return serve(local_runtime_api=True)


def frames(data: bytes) -> list[Any]:
    """Parse event-stream frames with botocore, which checks lengths and checksums."""
    buffer = EventStreamBuffer()
    buffer.add_data(data)
    return list(buffer)


def test_runtime_routes(runtime: FlaskClient) -> None:
    whole = runtime.post("/endpoints/any/invocations", json=ASK)
    assert whole.get_json() == {"generated_text": "Hi there"}
    assert whole.headers["X-Amzn-Invoked-Production-Variant"] == "AllTraffic"
    streamed = runtime.post(
        "/endpoints/any/invocations-response-stream",
        json={**ASK, "stream": True},
        headers={"X-Amzn-SageMaker-Accept": "text/event-stream", "Accept": "*/*"},
    )
    assert streamed.mimetype == "application/vnd.amazon.eventstream"
    assert streamed.headers["X-Amzn-SageMaker-Content-Type"] == "text/event-stream"
    parts = frames(streamed.get_data())
    assert {part.headers[":event-type"] for part in parts} == {"PayloadPart"}
    events = b"".join(part.payload for part in parts).split(b"\n\n")
    assert json.loads(events[-2].removeprefix(b"data: "))["generated_text"] == "Hi there"
    (only,) = frames(
        runtime.post("/endpoints/any/invocations-response-stream", json=ASK).get_data()
    )
    assert json.loads(only.payload) == {"generated_text": "Hi there"}


@pytest.mark.parametrize("path", ["invocations", "invocations-response-stream"])
def test_model_errors_become_runtime_errors(
    runtime: FlaskClient, engine: FakeEngine, path: str
) -> None:
    engine.script = fails("overloaded", "full")
    for body, status in (({"inputs": 5}, 400), (ASK, 503)):
        response = runtime.post(f"/endpoints/any/{path}", json=body)
        assert (response.status_code, response.headers["X-Amzn-ErrorType"]) == (424, "ModelError")
        error = response.get_json()
        assert error["OriginalStatusCode"] == status
        assert json.loads(error["OriginalMessage"])["code"] == status


def test_an_unread_event_stream_is_aborted(runtime: FlaskClient, engine: FakeEngine) -> None:
    engine.script = stalls(after=[65])
    response = runtime.post(
        "/endpoints/any/invocations-response-stream", json={**ASK, "stream": True}
    )
    response.close()
    eventually(lambda: engine.of_type(Abort))


def test_runtime_routes_are_disabled_by_default(http: FlaskClient) -> None:
    assert http.post("/endpoints/any/invocations", json=ASK).status_code == 404


def test_a_single_model_is_listed_under_models(http: FlaskClient) -> None:
    """LMI's own client counts a model's workers in the answer of /models/NAME."""
    entry = {"modelName": "demo", "modelUrl": "fake", "status": "READY"}
    assert http.get("/models").get_json() == {"models": [entry]}
    assert http.get("/models?next_page_token=demo").get_json() == {"models": []}
    (workflow,) = http.get("/models/demo").get_json()
    assert workflow.items() >= entry.items()
    (model,) = workflow["models"]
    assert len(model["workerGroups"][0]["workers"]) == 1
    assert http.get("/models/other").status_code == 404
    headers = {"X-Amzn-SageMaker-Target-Model": "demo.tar.gz"}
    answer = http.post("/models/demo/invoke", json=ASK, headers=headers)
    assert answer.get_json() == {"generated_text": "Hi there"}
    assert http.post("/models/other/invoke", json=ASK).status_code == 404


def test_a_single_model_cannot_be_loaded_or_unloaded(http: FlaskClient) -> None:
    body = {"model_name": "b", "url": "/opt/ml/models/b/model"}
    for response in (http.post("/models", json=body), http.delete("/models/demo")):
        assert (response.status_code, response.headers["Allow"]) == (405, "GET")
        assert "SAGEMAKER_MULTI_MODEL=true" in response.get_json()["error"]
