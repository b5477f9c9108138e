"""The HTTP routes of a model.py with a fake engine: responses, streams and sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from core.configuration.limits import CSV_BYTES
from core.protocol.messages import Abort, Failed, FromEngine, Perform, Performed
from tests.container.conftest import Serve, eventually
from tests.container.fake_engine import FakeEngine, fails, last_performed, performs


class TestHandlers:
    @pytest.fixture
    def http(self, task_app: Serve, engine: FakeEngine) -> FlaskClient:
        def answer(job: Perform) -> Performed:
            headers = {"X-Of": "handler", "Server": "mine", "X-Bad\n": "x", "X-Y": "a\r\nb"}
            return Performed(job.id, job.body[::-1], "text/x", 418, headers)

        engine.script = performs(answer)
        return task_app("handler", "/opt/ml/model/model.py")

    def test_any_content_type_is_passed_both_ways(
        self, http: FlaskClient, engine: FakeEngine
    ) -> None:
        response = http.post(
            "/invocations",
            data=b"\x00\xff{",
            content_type="application/x-thing",
            headers={"Accept": "image/*", "X-Amzn-SageMaker-Custom-Attributes": "a=b"},
        )
        assert (response.status_code, response.data) == (418, b"{\xff\x00")
        assert response.content_type == "text/x"
        headers = last_performed(engine).headers
        assert headers["Content-Type"] == "application/x-thing"
        assert headers["Accept"] == "image/*"
        assert headers["X-Amzn-Sagemaker-Custom-Attributes"] == "a=b"

    def test_handler_headers_are_passed_on_except_reserved_ones(self, http: FlaskClient) -> None:
        response = http.post("/invocations", data=b"12345")
        assert response.headers["X-Of"] == "handler"
        assert {"Server", "X-Y", "X-Bad"}.isdisjoint(response.headers.keys())
        assert response.headers["X-Request-Id"]

    def test_no_content(self, http: FlaskClient, engine: FakeEngine) -> None:
        engine.script = performs(lambda job: Performed(job.id, b"", "", 204))
        response = http.post("/invocations")
        assert (response.status_code, response.data) == (204, b"")

    def test_engine_errors(self, http: FlaskClient, engine: FakeEngine) -> None:
        engine.script = fails("failed", "ValueError: bad")
        response = http.post("/invocations", data=b"x")
        assert response.status_code == 424
        assert response.get_json() == {"error": "ValueError: bad", "code": 424}

    def test_a_body_that_is_too_large_is_rejected(self, task_app: Serve) -> None:
        http = task_app("handler", "/m.py", max_request_size=10)
        assert http.post("/invocations", data=b"x" * 11).status_code == 413

    def test_the_limit_of_csv_does_not_apply_to_handlers(
        self, http: FlaskClient, engine: FakeEngine
    ) -> None:
        """A handler gets the body of a request unparsed, whatever its content type."""
        body = b"a,b\n" * (CSV_BYTES.maximum // 4 + 1)
        assert http.post("/invocations", data=body, content_type="text/csv").status_code != 413
        assert last_performed(engine).body == body

    def test_a_header_opens_a_session(
        self, task_app: Serve, engine: FakeEngine, tmp_path: Any
    ) -> None:
        engine.script = performs(lambda job: Performed(job.id, b"ok", "text/plain"))
        options = {"enable_stateful_sessions": True, "sessions_path": str(tmp_path)}
        http = task_app("handler", "/m.py", **options)
        headers = {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}
        response = http.post("/invocations", data=b"x", headers=headers)
        assert response.data == b"ok"
        assert "Expires" in response.headers["X-Amzn-SageMaker-New-Session-Id"]

    def test_the_local_sagemaker_runtime(self, task_app: Serve, engine: FakeEngine) -> None:
        engine.script = performs(
            lambda job: Performed(job.id, json.dumps(job.headers["Accept"]).encode(), "a/b")
        )
        http = task_app("handler", "/m.py", local_runtime_api=True)
        path = "/endpoints/any/invocations"
        assert http.post(path, data=b"x", headers={"Accept": "c/d"}).get_data() == b'"c/d"'
        headers = {"X-Amzn-SageMaker-Accept": "e/f"}
        streamed = http.post(f"{path}-response-stream", data=b"x", headers=headers)
        assert b'"e/f"' in streamed.get_data()

    def test_parts_are_streamed_as_they_come(self, http: FlaskClient, engine: FakeEngine) -> None:
        def script(job: Perform) -> Iterator[FromEngine]:
            for part in (b"a\n", b"", b"b\n"):
                headers = {"X-Of": part.decode().strip()}
                yield Performed(job.id, part, "text/x", 201, headers, is_last=False)
            yield Performed(job.id, b"", "text/x")

        engine.script = script
        response = http.post("/invocations", data=b"x", buffered=False)
        assert (response.status_code, response.content_type) == (201, "text/x")
        assert response.headers["X-Of"] == "a"
        assert list(response.iter_encoded()) == [b"a\n", b"b\n"]
        assert not engine.of_type(Abort)

    def test_a_failed_stream_ends_with_an_error_line(
        self, http: FlaskClient, engine: FakeEngine
    ) -> None:
        for first_part in (b"a\n", b"a"):

            def script(job: Perform, first_part: bytes = first_part) -> Iterator[FromEngine]:
                yield Performed(job.id, first_part, "text/x", is_last=False)
                yield Failed(job.id, "failed", "ValueError: bad")

            engine.script = script
            first, last = http.post("/invocations", data=b"x").data.splitlines()
            assert first == b"a"
            assert json.loads(last) == {"error": "ValueError: bad", "code": 424}

    def test_disconnecting_aborts_the_stream(self, http: FlaskClient, engine: FakeEngine) -> None:
        def script(job: Perform) -> Iterator[FromEngine]:
            yield Performed(job.id, b"a", "text/x", is_last=False)

        engine.script = script
        response = http.post("/invocations", data=b"x", buffered=False)
        assert next(response.iter_encoded()) == b"a"
        response.close()
        eventually(lambda: engine.of_type(Abort) == [Abort(last_performed(engine).id)])

    def test_a_stream_times_out(self, task_app: Serve, engine: FakeEngine) -> None:
        def script(job: Perform) -> Iterator[FromEngine]:
            yield Performed(job.id, b"a\n", "text/x", is_last=False)

        engine.script = script
        response = task_app("handler", "/m.py", predict_timeout=1).post("/invocations", data=b"x")
        assert b"option.predict_timeout" in response.data.splitlines()[1]
        eventually(lambda: engine.of_type(Abort))
