"""The HTTP surface of tasks over a scripted engine."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import msgspec
import pytest
from flask.testing import FlaskClient

from container.engine_client import EngineClient
from container.task_app import create_task_app
from core.messages import Abort, Dead, Failed, FromEngine, Hello, Perform, Performed
from core.options import Options
from core.task import Task
from core.task_bodies import EmbeddingAnswer, EmbeddingBody, PipelineBody
from tests.container.conftest import eventually
from tests.container.fake_engine import FACTS, FakeEngine, fails, performs, stalls

MakeApp = Callable[..., FlaskClient]


@pytest.fixture
def client(endpoint: str, engine: FakeEngine) -> Iterator[EngineClient]:
    engine.facts = msgspec.structs.replace(FACTS, executor="task", max_model_len=0)
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    eventually(lambda: client.health().healthy)
    yield client
    client.close()


@pytest.fixture
def serve(client: EngineClient) -> MakeApp:
    """The application of a task, called in this process."""

    def serve(kind: str, name: str = "text-classification", **options: Any) -> FlaskClient:
        task = Task(kind=kind, name=name)  # pyright: ignore[reportArgumentType]
        return create_task_app(client, Options(**options), "demo", task).test_client()

    return serve


def last(engine: FakeEngine) -> Perform:
    message = engine.of_type(Perform)[-1]
    assert isinstance(message, Perform)
    return message


class TestPipelines:
    @pytest.fixture
    def http(self, serve: MakeApp, engine: FakeEngine) -> FlaskClient:
        engine.script = performs(lambda asked: Performed(asked.id, b"[1]", "application/json"))
        return serve("pipeline")

    @pytest.mark.parametrize(
        ("sent", "expected"),
        [
            ({"json": {"inputs": "a"}}, PipelineBody(["a"], False, {})),
            ({"json": {"inputs": ["a", {"text": "b"}], "parameters": {"top_k": 2}}},
             PipelineBody(["a", {"text": "b"}], True, {"top_k": 2})),
            ({"data": "some text", "content_type": "text/plain"},
             PipelineBody(["some text"], False, {})),
            ({"data": "inputs\na\nb\n", "content_type": "text/csv"},
             PipelineBody(["a", "b"], True, {})),
        ],
    )  # fmt: skip
    def test_what_the_engine_gets(
        self, http: FlaskClient, engine: FakeEngine, sent: Any, expected: PipelineBody
    ) -> None:
        for path in ("/invocations", "/predictions/demo"):
            response = http.post(path, **sent)
            assert (response.status_code, response.get_json()) == (200, [1])
            assert response.content_type == "application/json"
        assert msgspec.msgpack.decode(last(engine).body, type=PipelineBody) == expected

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({}, "inputs"),
            ({"inputs": ""}, "inputs"),
            ({"inputs": 3}, "inputs"),
            ({"inputs": []}, "inputs"),
            ({"inputs": ["a", None]}, "inputs[1]"),
            ({"inputs": "a", "parameter": {}}, "parameter"),
            ({"inputs": "a", "parameters": [1]}, "parameters"),
            ({"inputs": "a", "parameters": {"top_kk": 1}}, "parameters.top_kk"),
            ({"inputs": "a", "parameters": {"batch_size": 9}}, "parameters.batch_size"),
        ],
    )
    def test_wrong_requests(self, http: FlaskClient, body: Any, field: str) -> None:
        response = http.post("/invocations", json=body)
        assert (response.status_code, response.get_json()["field"]) == (400, field)

    def test_how_it_is_computed_is_never_for_a_request_to_say(self, serve: MakeApp) -> None:
        http = serve("pipeline", "table-question-answering")
        for name in ("batch_size", "num_workers", "timeout"):
            body = {"inputs": {"query": "q"}, "parameters": {name: 1}}
            assert http.post("/invocations", json=body).status_code == 400

    def test_errors_of_the_engine(self, http: FlaskClient, engine: FakeEngine) -> None:
        for script, status, field in (
            (fails("rejected", "too long", "inputs"), 400, "inputs"),
            (fails("failed", "RuntimeError: x"), 424, None),
            (fails("overloaded", "full"), 503, None),
        ):
            engine.script = script
            response = http.post("/invocations", json={"inputs": "a"})
            assert response.status_code == status
            assert response.get_json().get("field") == field

    def test_a_late_answer(self, serve: MakeApp, engine: FakeEngine) -> None:
        engine.script = stalls()
        http = serve("pipeline", predict_timeout=1)
        response = http.post("/invocations", json={"inputs": "a"})
        assert response.status_code == 424
        assert "option.predict_timeout" in response.get_json()["error"]
        eventually(lambda: engine.of_type(Abort) == [Abort(last(engine).id)])

    def test_a_client_that_hangs_up(
        self, http: FlaskClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.script = stalls()
        monkeypatch.setattr("container.host.disconnect_check", lambda _: lambda: True)
        assert http.post("/invocations", json={"inputs": "a"}).status_code == 499
        eventually(lambda: engine.of_type(Abort))

    def test_an_engine_that_dies(self, http: FlaskClient, engine: FakeEngine) -> None:
        engine.script = stalls()
        post = gevent.spawn(http.post, "/invocations", json={"inputs": "a"})
        eventually(lambda: engine.of_type(Perform))
        engine.send(Dead("out of memory"))
        response = post.get(timeout=5)
        assert response.status_code == 424
        assert "out of memory" in response.get_json()["error"]
        eventually(lambda: len(engine.of_type(Hello)) > 1)
        assert not engine.of_type(Abort), "the next engine knows nothing of it"

    def test_an_answered_request_is_not_aborted(
        self, http: FlaskClient, engine: FakeEngine
    ) -> None:
        for _ in range(3):
            http.post("/invocations", json={"inputs": "a"})
        assert len(engine.of_type(Perform)) == 3
        assert not engine.of_type(Abort)

    def test_what_other_tasks_have_is_not_here(self, http: FlaskClient) -> None:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize"):
            assert http.post(path, json={}).status_code == 404
        assert http.get("/v1/models/demo").get_json()["id"] == "demo"


class TestImages:
    IMAGE = b"\x89PNG..."

    @pytest.fixture
    def http(self, serve: MakeApp, engine: FakeEngine) -> FlaskClient:
        engine.script = performs(lambda asked: Performed(asked.id, b"[]", "application/json"))
        return serve("pipeline", "image-classification")

    def test_as_they_are_and_in_base64(self, http: FlaskClient, engine: FakeEngine) -> None:
        encoded = base64.b64encode(self.IMAGE).decode()
        uri = f"data:image/png;base64,{encoded}"
        for sent, count in (
            ({"data": self.IMAGE, "content_type": "image/png"}, 1),
            ({"data": self.IMAGE, "content_type": "application/octet-stream"}, 1),
            ({"json": {"inputs": encoded}}, 1),
            ({"json": {"inputs": [encoded, uri]}}, 2),
        ):
            assert http.post("/invocations", **sent).status_code == 200
            body = msgspec.msgpack.decode(last(engine).body, type=PipelineBody)
            assert body.inputs == [self.IMAGE] * count

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ("https://example.com/cat.png", "not fetched"),
            ("/etc/passwd", "not base64"),
            ("not base64!", "not base64"),
            ({"url": "x"}, "image in base64"),
        ],
    )
    def test_nothing_is_fetched_or_opened(
        self, http: FlaskClient, engine: FakeEngine, inputs: Any, message: str
    ) -> None:
        response = http.post("/invocations", json={"inputs": inputs})
        assert response.status_code == 400
        assert message in response.get_json()["error"]
        assert not engine.of_type(Perform)

    def test_sounds_are_sent_alike(self, serve: MakeApp, engine: FakeEngine) -> None:
        engine.script = performs(lambda asked: Performed(asked.id, b"{}", "application/json"))
        http = serve("pipeline", "automatic-speech-recognition")
        uri = f"data:audio/wav;base64,{base64.b64encode(b'RIFF').decode()}"
        for sent in (
            {"data": b"RIFF", "content_type": "audio/wav"},
            {"json": {"inputs": uri, "parameters": {"return_timestamps": "word"}}},
        ):
            assert http.post("/invocations", **sent).status_code == 200  # pyright: ignore
            body = msgspec.msgpack.decode(last(engine).body, type=PipelineBody)
            assert body.inputs == [b"RIFF"]
        wrong = http.post("/invocations", json={"inputs": {"raw": [0.5]}})
        assert "audio in base64" in wrong.get_json()["error"]
        image = http.post("/invocations", data=b"x", content_type="image/png")
        assert image.status_code == 415

    def test_elsewhere_an_image_is_no_body(self, serve: MakeApp) -> None:
        response = serve("pipeline").post("/invocations", data=b"x", content_type="image/png")
        assert response.status_code == 415


class TestEmbeddings:
    @pytest.fixture
    def http(self, serve: MakeApp, engine: FakeEngine) -> FlaskClient:
        """Every input has the vector (0.5, its place), and two tokens."""

        def answer(asked: Perform) -> Performed:
            count = len(msgspec.msgpack.decode(asked.body, type=EmbeddingBody).inputs)
            vectors = [struct.pack("<2f", 0.5, at) for at in range(count)]
            body = msgspec.msgpack.encode(EmbeddingAnswer(vectors, [2] * count))
            return Performed(asked.id, body, "application/msgpack")

        engine.script = performs(answer)
        return serve("embedding", "text-embedding")

    def test_openai(self, http: FlaskClient, engine: FakeEngine) -> None:
        response = http.post("/v1/embeddings", json={"input": ["a", "b"], "model": "x"})
        assert response.get_json() == {
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [0.5, 0.0]},
                {"object": "embedding", "index": 1, "embedding": [0.5, 1.0]},
            ],
            "model": "demo",
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        }
        body = msgspec.msgpack.decode(last(engine).body, type=EmbeddingBody)
        assert body == EmbeddingBody(["a", "b"], "input")

    def test_base64(self, http: FlaskClient) -> None:
        body = {"input": "a", "encoding_format": "base64"}
        data = http.post("/v1/embeddings", json=body).get_json()["data"]
        assert struct.unpack("<2f", base64.b64decode(data[0]["embedding"])) == (0.5, 0.0)

    @pytest.mark.parametrize(
        ("sent", "body"),
        [
            ({"input": [1, 2]}, EmbeddingBody([[1, 2]], "input")),
            ({"input": [[1], [2]]}, EmbeddingBody([[1], [2]], "input")),
            ({"input": "a", "dimensions": 8}, EmbeddingBody(["a"], "input", dimensions=8)),
            ({"input": "a", "truncate_prompt_tokens": 3}, EmbeddingBody(["a"], "input", 3)),
            (
                {"input": "a", "truncate_prompt_tokens": -1},
                EmbeddingBody(["a"], "input", 2**31 - 1),
            ),
        ],
    )
    def test_what_the_engine_gets(
        self, http: FlaskClient, engine: FakeEngine, sent: Any, body: EmbeddingBody
    ) -> None:
        for path in ("/v1/embeddings", "/invocations"):
            assert http.post(path, json=sent).get_json()["object"] == "list"
            assert msgspec.msgpack.decode(last(engine).body, type=EmbeddingBody) == body

    def test_inputs(self, http: FlaskClient, engine: FakeEngine) -> None:
        for sent, vectors, max_tokens in (
            ({"inputs": "a"}, 1, None),
            ({"inputs": ["a", "b"], "parameters": {"truncate": True}}, 2, 2**31 - 1),
            ({"inputs": ["a"], "truncate": True}, 1, 2**31 - 1),
        ):
            answer = http.post("/invocations", json=sent).get_json()
            assert answer == [[0.5, float(at)] for at in range(vectors)]
            body = msgspec.msgpack.decode(last(engine).body, type=EmbeddingBody)
            assert (body.field, body.max_tokens) == ("inputs", max_tokens)

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({}, "input"),
            ({"input": ""}, "input"),
            ({"input": []}, "input"),
            ({"input": ["a", ""]}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": {}}, "input"),
            ({"input": ["a"] * 2049}, "input"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "dimensions": 0}, "dimensions"),
            ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({"inputs": "a"}, "inputs"),
        ],
    )
    def test_wrong_requests(self, http: FlaskClient, body: Any, field: str) -> None:
        response = http.post("/v1/embeddings", json=body)
        error = response.get_json()["error"]
        assert (response.status_code, error["param"]) == (400, field)


class TestHandlers:
    @pytest.fixture
    def http(self, serve: MakeApp, engine: FakeEngine) -> FlaskClient:
        def answer(asked: Perform) -> Performed:
            headers = {"X-Of": "handler", "Server": "mine", "X-Bad\n": "x", "X-Y": "a\r\nb"}
            return Performed(asked.id, asked.body[::-1], "text/x", 418, headers)

        engine.script = performs(answer)
        return serve("handler", "/opt/ml/model/model.py")

    def test_bodies_of_any_type_go_both_ways(self, http: FlaskClient, engine: FakeEngine) -> None:
        response = http.post(
            "/invocations",
            data=b"\x00\xff{",
            content_type="application/x-thing",
            headers={"Accept": "image/*", "X-Amzn-SageMaker-Custom-Attributes": "a=b"},
        )
        assert (response.status_code, response.data) == (418, b"{\xff\x00")
        assert response.content_type == "text/x"
        headers = last(engine).headers
        assert headers["Content-Type"] == "application/x-thing"
        assert headers["Accept"] == "image/*"
        assert headers["X-Amzn-Sagemaker-Custom-Attributes"] == "a=b"

    def test_headers_of_the_handler_as_far_as_they_are_its(self, http: FlaskClient) -> None:
        response = http.post("/invocations", data=b"12345")
        assert response.headers["X-Of"] == "handler"
        assert {"Server", "X-Y", "X-Bad"}.isdisjoint(response.headers.keys())
        assert response.headers["X-Request-Id"]

    def test_no_content(self, http: FlaskClient, engine: FakeEngine) -> None:
        engine.script = performs(lambda asked: Performed(asked.id, b"", "", 204))
        response = http.post("/invocations")
        assert (response.status_code, response.data) == (204, b"")

    def test_errors_of_the_engine(self, http: FlaskClient, engine: FakeEngine) -> None:
        engine.script = fails("failed", "ValueError: bad")
        response = http.post("/invocations", data=b"x")
        assert response.status_code == 424
        assert response.get_json() == {"error": "ValueError: bad", "code": 424}

    def test_a_body_that_is_too_large(self, serve: MakeApp) -> None:
        http = serve("handler", "/m.py", max_request_size=10)
        assert http.post("/invocations", data=b"x" * 11).status_code == 413

    def test_sessions_by_header(self, serve: MakeApp, engine: FakeEngine, tmp_path: Any) -> None:
        engine.script = performs(lambda asked: Performed(asked.id, b"ok", "text/plain"))
        options = {"enable_stateful_sessions": True, "sessions_path": str(tmp_path)}
        http = serve("handler", "/m.py", **options)
        headers = {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}
        response = http.post("/invocations", data=b"x", headers=headers)
        assert response.data == b"ok"
        assert "Expires" in response.headers["X-Amzn-SageMaker-New-Session-Id"]

    def test_the_runtime_of_a_laptop(self, serve: MakeApp, engine: FakeEngine) -> None:
        engine.script = performs(
            lambda asked: Performed(asked.id, json.dumps(asked.headers["Accept"]).encode(), "a/b")
        )
        http = serve("handler", "/m.py", local_runtime_api=True)
        path = "/endpoints/any/invocations"
        assert http.post(path, data=b"x", headers={"Accept": "c/d"}).get_data() == b'"c/d"'
        headers = {"X-Amzn-SageMaker-Accept": "e/f"}
        streamed = http.post(f"{path}-response-stream", data=b"x", headers=headers)
        assert b'"e/f"' in streamed.get_data()

    def test_parts_as_they_come(self, http: FlaskClient, engine: FakeEngine) -> None:
        def script(asked: Perform) -> Iterator[FromEngine]:
            for part in (b"a\n", b"", b"b\n"):
                headers = {"X-Of": part.decode().strip()}
                yield Performed(asked.id, part, "text/x", 201, headers, is_last=False)
            yield Performed(asked.id, b"", "text/x")

        engine.script = script
        response = http.post("/invocations", data=b"x", buffered=False)
        assert (response.status_code, response.content_type) == (201, "text/x")
        assert response.headers["X-Of"] == "a"
        assert list(response.iter_encoded()) == [b"a\n", b"b\n"]
        assert not engine.of_type(Abort)

    def test_a_stream_that_fails_says_so_in_its_last_line(
        self, http: FlaskClient, engine: FakeEngine
    ) -> None:
        for begun in (b"a\n", b"a"):

            def script(asked: Perform, begun: bytes = begun) -> Iterator[FromEngine]:
                yield Performed(asked.id, begun, "text/x", is_last=False)
                yield Failed(asked.id, "failed", "ValueError: bad")

            engine.script = script
            first, last = http.post("/invocations", data=b"x").data.splitlines()
            assert first == b"a"
            assert json.loads(last) == {"error": "ValueError: bad", "code": 424}

    def test_a_client_that_leaves_a_stream(self, http: FlaskClient, engine: FakeEngine) -> None:
        def script(asked: Perform) -> Iterator[FromEngine]:
            yield Performed(asked.id, b"a", "text/x", is_last=False)

        engine.script = script
        response = http.post("/invocations", data=b"x", buffered=False)
        assert next(response.iter_encoded()) == b"a"
        response.close()
        eventually(lambda: engine.of_type(Abort) == [Abort(last(engine).id)])

    def test_a_late_end(self, serve: MakeApp, engine: FakeEngine) -> None:
        def script(asked: Perform) -> Iterator[FromEngine]:
            yield Performed(asked.id, b"a\n", "text/x", is_last=False)

        engine.script = script
        response = serve("handler", "/m.py", predict_timeout=1).post("/invocations", data=b"x")
        assert b"option.predict_timeout" in response.data.splitlines()[1]
        eventually(lambda: engine.of_type(Abort))
