"""The HTTP routes of tasks with a fake engine."""

from __future__ import annotations

import base64
import struct
from typing import Any

import gevent
import msgspec
import pytest
from flask.testing import FlaskClient

from container.http.off_loop import LONG_BODY_BYTES
from core.protocol.messages import Abort, Dead, Hello, Perform, Performed
from core.protocol.task_bodies import EmbeddingAnswer, EmbeddingBody, PipelineBody
from tests.container.conftest import Serve, eventually
from tests.container.fake_engine import FakeEngine, fails, last_performed, performs, stalls


class TestPipelines:
    @pytest.fixture
    def http(self, task_app: Serve, engine: FakeEngine) -> FlaskClient:
        engine.script = performs(lambda job: Performed(job.id, b"[1]", "application/json"))
        return task_app("pipeline")

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
    def test_messages_to_the_engine(
        self, http: FlaskClient, engine: FakeEngine, sent: Any, expected: PipelineBody
    ) -> None:
        for path in ("/invocations", "/predictions/demo"):
            response = http.post(path, **sent)
            assert (response.status_code, response.get_json()) == (200, [1])
            assert response.content_type == "application/json"
        assert msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody) == expected

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
    def test_invalid_requests(self, http: FlaskClient, body: Any, field: str) -> None:
        response = http.post("/invocations", json=body)
        assert (response.status_code, response.get_json()["field"]) == (400, field)

    def test_parameters_that_requests_may_not_set(
        self, task_app: Serve, engine: FakeEngine
    ) -> None:
        """These parameters change how the model runs, or make transformers load files or code."""
        engine.script = performs(lambda job: Performed(job.id, b"[]", "application/json"))
        for task, inputs in (
            ("table-question-answering", {"table": {"a": ["1"]}, "query": "q"}),
            ("image-text-to-text", {"text": "a"}),
            ("text-to-audio", "a"),
        ):
            http = task_app("pipeline", task)
            assert http.post("/invocations", json={"inputs": inputs}).status_code == 200
            for name, value in (
                ("batch_size", 1), ("num_workers", 1), ("timeout", 1), ("tokenizer", "/etc"),
                ("preprocess_params", {"voice_preset": "/etc/passwd"}), ("chat_template", "{}"),
                ("generate_kwargs", {"custom_generate": "/tmp"}), ("generate_kwargs", 1),
                ("generate_kwargs", {"max_new_tokens": 10**9}),
            ):  # fmt: skip
                body = {"inputs": inputs, "parameters": {name: value}}
                response = http.post("/invocations", json=body)
                assert response.status_code == 400
                assert response.get_json()["field"].startswith(f"parameters.{name}")

    def test_engine_errors(self, http: FlaskClient, engine: FakeEngine) -> None:
        for script, status, field in (
            (fails("rejected", "too long", "inputs"), 400, "inputs"),
            (fails("failed", "RuntimeError: x"), 424, None),
            (fails("overloaded", "full"), 503, None),
        ):
            engine.script = script
            response = http.post("/invocations", json={"inputs": "a"})
            assert response.status_code == status
            assert response.get_json().get("field") == field

    def test_request_timeout(self, task_app: Serve, engine: FakeEngine) -> None:
        engine.script = stalls()
        http = task_app("pipeline", predict_timeout=1)
        response = http.post("/invocations", json={"inputs": "a"})
        assert response.status_code == 424
        assert "option.predict_timeout" in response.get_json()["error"]
        aborted = [Abort(last_performed(engine).id, reason="timeout")]
        eventually(lambda: engine.of_type(Abort) == aborted)

    def test_disconnecting_aborts_the_request(
        self, http: FlaskClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.script = stalls()
        monkeypatch.setattr("container.http.headers.disconnect_check", lambda _: lambda: True)
        assert http.post("/invocations", json={"inputs": "a"}).status_code == 499
        eventually(lambda: engine.of_type(Abort))

    def test_engine_death(self, http: FlaskClient, engine: FakeEngine) -> None:
        engine.script = stalls()
        post = gevent.spawn(http.post, "/invocations", json={"inputs": "a"})
        eventually(lambda: engine.of_type(Perform))
        engine.send(Dead("out of memory"))
        response = post.get(timeout=60)
        assert response.status_code == 424
        assert "out of memory" in response.get_json()["error"]
        eventually(lambda: len(engine.of_type(Hello)) > 1)
        assert not engine.of_type(Abort), "the new engine has nothing to abort"

    def test_an_answered_request_is_not_aborted(
        self, http: FlaskClient, engine: FakeEngine
    ) -> None:
        for _ in range(3):
            http.post("/invocations", json={"inputs": "a"})
        assert len(engine.of_type(Perform)) == 3
        assert not engine.of_type(Abort)

    def test_routes_of_other_tasks_are_absent(self, http: FlaskClient) -> None:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize"):
            assert http.post(path, json={}).status_code == 404
        assert http.get("/v1/models/demo").get_json()["id"] == "demo"


class TestImages:
    IMAGE = b"\x89PNG..."

    @pytest.fixture
    def http(self, task_app: Serve, engine: FakeEngine) -> FlaskClient:
        engine.script = performs(lambda job: Performed(job.id, b"[]", "application/json"))
        return task_app("pipeline", "image-classification")

    def test_images_as_bodies_and_in_base64(self, http: FlaskClient, engine: FakeEngine) -> None:
        encoded = base64.b64encode(self.IMAGE).decode()
        uri = f"data:image/png;base64,{encoded}"
        for sent, count in (
            ({"data": self.IMAGE, "content_type": "image/png"}, 1),
            ({"data": self.IMAGE, "content_type": "application/octet-stream"}, 1),
            ({"json": {"inputs": encoded}}, 1),
            ({"json": {"inputs": [encoded, uri]}}, 2),
        ):
            assert http.post("/invocations", **sent).status_code == 200
            body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
            assert body.inputs == [self.IMAGE] * count

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ("https://example.com/cat.png", "not fetched"),
            ("/etc/passwd", "not valid base64"),
            ("not base64!", "not valid base64"),
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

    def test_sounds_are_sent_in_the_same_ways(self, task_app: Serve, engine: FakeEngine) -> None:
        engine.script = performs(lambda job: Performed(job.id, b"{}", "application/json"))
        http = task_app("pipeline", "automatic-speech-recognition")
        uri = f"data:audio/wav;base64,{base64.b64encode(b'RIFF').decode()}"
        for sent in (
            {"data": b"RIFF", "content_type": "audio/wav"},
            {"json": {"inputs": uri, "parameters": {"return_timestamps": "word"}}},
        ):
            assert http.post("/invocations", **sent).status_code == 200  # pyright: ignore
            body = msgspec.msgpack.decode(last_performed(engine).body, type=PipelineBody)
            assert body.inputs == [b"RIFF"]
        wrong = http.post("/invocations", json={"inputs": {"raw": [0.5]}})
        assert "audio in base64" in wrong.get_json()["error"]
        image = http.post("/invocations", data=b"x", content_type="image/png")
        assert image.status_code == 415

    def test_image_bodies_are_rejected_for_other_tasks(self, task_app: Serve) -> None:
        response = task_app("pipeline").post("/invocations", data=b"x", content_type="image/png")
        assert response.status_code == 415


class TestEmbeddings:
    @pytest.fixture
    def http(self, task_app: Serve, engine: FakeEngine) -> FlaskClient:
        """A client whose engine returns, for each input, the vector (0.5, index of the input) and
        the number of its tokens, which is always two."""

        def answer(job: Perform) -> Performed:
            count = len(msgspec.msgpack.decode(job.body, type=EmbeddingBody).inputs)
            vectors = [struct.pack("<2f", 0.5, at) for at in range(count)]
            body = msgspec.msgpack.encode(EmbeddingAnswer(vectors, [2] * count))
            return Performed(job.id, body, "application/msgpack")

        engine.script = performs(answer)
        return task_app("embedding", "text-embedding")

    def test_openai_route(self, http: FlaskClient, engine: FakeEngine) -> None:
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
        body = msgspec.msgpack.decode(last_performed(engine).body, type=EmbeddingBody)
        assert body == EmbeddingBody(["a", "b"], "input")

    def test_base64(self, http: FlaskClient) -> None:
        body = {"input": "a", "encoding_format": "base64"}
        data = http.post("/v1/embeddings", json=body).get_json()["data"]
        assert struct.unpack("<2f", base64.b64decode(data[0]["embedding"])) == (0.5, 0.0)

    def test_base64_of_float16(self, http: FlaskClient, engine: FakeEngine) -> None:
        body = {"input": "a", "encoding_format": "base64", "embed_dtype": "float16"}
        (entry,) = http.post("/v1/embeddings", json=body).get_json()["data"]
        assert struct.unpack("<2e", base64.b64decode(entry["embedding"])) == (0.5, 0.0)
        large = msgspec.msgpack.encode(EmbeddingAnswer([struct.pack("<f", 1e6)], [1]))
        engine.script = performs(lambda job: Performed(job.id, large, "x/y"))
        refused = [body, {"input": "a", "embed_dtype": "float16"}, {**body, "embed_dtype": "int8"}]
        for each in refused:
            response = http.post("/v1/embeddings", json=each)
            assert response.status_code == 400
            assert response.get_json()["error"]["param"] == "embed_dtype"

    def test_embed_of_text_embeddings_inference(
        self, http: FlaskClient, engine: FakeEngine
    ) -> None:
        body = {"inputs": ["a", "b"], "normalize": False, "prompt_name": "q", "truncate": True}
        assert http.post("/embed", json=body).get_json() == [[0.5, 0.0], [0.5, 1.0]]
        sent = msgspec.msgpack.decode(last_performed(engine).body, type=EmbeddingBody)
        assert sent == EmbeddingBody(
            ["a", "b"], "inputs", 2**31 - 1, normalize=False, prompt_name="q"
        )
        assert http.post("/embed", json={"inputs": "a"}).get_json() == [[0.5, 0.0]]
        sent = msgspec.msgpack.decode(last_performed(engine).body, type=EmbeddingBody)
        assert sent == EmbeddingBody(["a"], "inputs", normalize=True)

    @pytest.mark.usefixtures("http")
    def test_requests_may_name_an_adapter(self, task_app: Serve, engine: FakeEngine) -> None:
        lora = task_app("embedding", "text-embedding", enable_lora=True)
        loaded = lora.post("/adapters", json={"name": "a", "src": "/opt/ml/model/a"})
        assert loaded.status_code == 200
        header = "X-Amzn-SageMaker-Adapter-Identifier"
        for path, body, headers, variant in (
            ("/v1/embeddings", {"input": "x", "model": "a"}, {}, "a"),
            ("/v1/embeddings", {"input": "x", "model": "demo"}, {}, ""),
            ("/v1/embeddings", {"input": "x"}, {}, ""),
            ("/invocations", {"inputs": "x", "adapters": "a"}, {}, "a"),
            ("/invocations", {"inputs": "x", "adapters": ""}, {header: "a"}, ""),
            ("/embed", {"inputs": "x"}, {header: "a"}, "a"),
        ):
            response = lora.post(path, json=body, headers=headers)
            assert (response.status_code, last_performed(engine).variant) == (200, variant)
            if path == "/v1/embeddings":
                assert response.get_json()["model"] == (variant or "demo")
        assert [model["id"] for model in lora.get("/v1/models").get_json()["data"]] == ["demo", "a"]
        unknown = lora.post("/v1/embeddings", json={"input": "x", "model": "b"})
        assert unknown.status_code == 404

    def test_adapters_need_the_option(self, http: FlaskClient) -> None:
        response = http.post("/v1/embeddings", json={"input": "x", "adapters": "a"})
        assert response.status_code == 400
        assert "option.enable_lora=true" in response.get_json()["error"]["message"]
        assert http.get("/adapters").status_code == 400

    def test_sparse_vectors(self, http: FlaskClient, engine: FakeEngine) -> None:
        vectors, places = [struct.pack("<2f", 0.5, 2.0), b""], [struct.pack("<2i", 7, 30_000), b""]
        answer = msgspec.msgpack.encode(EmbeddingAnswer(vectors, [2, 2], places))
        engine.script = performs(lambda job: Performed(job.id, answer, "x/y"))
        body = {"inputs": ["a", "b"], "prompt_name": "q"}
        expected = [[{"index": 7, "value": 0.5}, {"index": 30_000, "value": 2.0}], []]
        assert http.post("/embed_sparse", json=body).get_json() == expected
        sent = msgspec.msgpack.decode(last_performed(engine).body, type=EmbeddingBody)
        assert sent == EmbeddingBody(["a", "b"], "inputs", prompt_name="q", is_sparse=True)
        assert http.post("/invocations", json={"inputs": ["a", "b"]}).get_json() == expected
        sent = msgspec.msgpack.decode(last_performed(engine).body, type=EmbeddingBody)
        assert sent == EmbeddingBody(["a", "b"], "inputs", is_sparse=None)
        refused = http.post("/embed_sparse", json={"inputs": "a", "normalize": True})
        assert (refused.status_code, refused.get_json()["field"]) == (400, "normalize")

    @pytest.mark.parametrize("kind", ["float", "base64"])
    def test_a_long_answer_is_encoded_in_a_thread(
        self, http: FlaskClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """In the event loop, encoding a long answer would make the worker's other requests wait."""
        hub, applied = gevent.get_hub(), []
        pool = hub.threadpool

        class Pool:
            def apply(self, *call: Any) -> None:
                applied.append(call)
                pool.apply(*call)

        monkeypatch.setattr(hub, "threadpool", Pool())
        for num_bytes, num_applied in ((LONG_BODY_BYTES, 0), (LONG_BODY_BYTES + 4, 1)):
            answer = msgspec.msgpack.encode(EmbeddingAnswer([bytes(num_bytes)], [1]))
            engine.script = performs(lambda job, answer=answer: Performed(job.id, answer, "x/y"))
            body = {"input": "a", "encoding_format": kind}
            (entry,) = http.post("/v1/embeddings", json=body).get_json()["data"]
            vector = entry["embedding"]
            assert (len(vector) if kind == "float" else len(base64.b64decode(vector)) / 4) == (
                num_bytes / 4
            )
            assert len(applied) == num_applied

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
    def test_messages_to_the_engine(
        self, http: FlaskClient, engine: FakeEngine, sent: Any, body: EmbeddingBody
    ) -> None:
        for path in ("/v1/embeddings", "/invocations"):
            assert http.post(path, json=sent).get_json()["object"] == "list"
            assert msgspec.msgpack.decode(last_performed(engine).body, type=EmbeddingBody) == body

    def test_lmi_inputs(self, http: FlaskClient, engine: FakeEngine) -> None:
        for sent, vectors, max_tokens in (
            ({"inputs": "a"}, 1, None),
            ({"inputs": ["a", "b"], "parameters": {"truncate": True}}, 2, 2**31 - 1),
            ({"inputs": ["a"], "truncate": True}, 1, 2**31 - 1),
        ):
            answer = http.post("/invocations", json=sent).get_json()
            assert answer == [[0.5, float(at)] for at in range(vectors)]
            body = msgspec.msgpack.decode(last_performed(engine).body, type=EmbeddingBody)
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
    def test_invalid_requests(self, http: FlaskClient, body: Any, field: str) -> None:
        response = http.post("/v1/embeddings", json=body)
        error = response.get_json()["error"]
        assert (response.status_code, error["param"]) == (400, field)
