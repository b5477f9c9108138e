"""Reranking and scores with a fake cross-encoder, as other servers' clients ask for them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient

from core.protocol.messages import Failed, Perform, Performed
from core.protocol.task_bodies import PipelineBody
from tests.container.conftest import Serve
from tests.container.fake_engine import FakeEngine, performs

ASK = {"query": "What?", "documents": ["a", "ccc", {"text": "bb"}]}


def jobs(engine: FakeEngine) -> list[PipelineBody]:
    return [
        msgspec.msgpack.decode(job.body, type=PipelineBody)
        for job in engine.of_type(Perform)
        if isinstance(job, Perform)
    ]


@pytest.fixture
def encoder(task_app: Serve, engine: FakeEngine) -> FlaskClient:
    """A cross-encoder that scores a pair of texts by the length of the second text.

    It gives one label for each "?" in the first text, and an error if "!" is in the second.
    """

    def answer(job: Perform) -> Performed:
        def result(pair: Any) -> object:
            if "!" in pair["text_pair"]:
                return {"error": "inputs: too long", "code": 400, "field": "inputs"}
            labels = pair["text"].count("?")
            return [{"label": "L", "score": len(pair["text_pair"]) / 10}] * labels

        pairs = msgspec.msgpack.decode(job.body, type=PipelineBody).inputs
        return Performed(job.id, msgspec.json.encode(list(map(result, pairs))), "application/json")

    engine.script = performs(answer)
    return task_app("pipeline")


def test_a_request_that_the_model_cannot_take_at_all(task_app: Serve, engine: FakeEngine) -> None:
    """The engine then answers with one error, in the names of the pipeline's own API."""

    def refuse(job: Perform) -> Failed:
        hint = "has 40 tokens; set parameters.truncation=true"
        return Failed(job.id, "rejected", hint, "inputs")

    engine.script = performs(refuse)
    error = task_app("pipeline").post("/v1/rerank", json=ASK).get_json()["error"]
    assert error["param"] == "documents"
    assert error["message"] == "documents: has 40 tokens; set truncate=true"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/invocations"])
def test_vllms_and_coheres_form(encoder: FlaskClient, engine: FakeEngine, path: str) -> None:
    answer = encoder.post(path, json={**ASK, "model": "m", "top_n": 2}).get_json()
    assert answer["results"] == [
        {"index": 1, "relevance_score": 0.3, "document": {"text": "ccc"}},
        {"index": 2, "relevance_score": 0.2, "document": {"text": "bb"}},
    ]
    assert (answer["model"], answer["id"][:7]) == ("demo", "rerank-")
    (job,) = jobs(engine)
    assert job.inputs[0] == {"text": "What?", "text_pair": "a"}
    assert job.parameters == {"top_k": 2, "function_to_apply": "sigmoid"}
    bare = encoder.post(path, json={**ASK, "return_documents": False}).get_json()["results"]
    assert bare[0] == {"index": 1, "relevance_score": 0.3}
    assert len(bare) == 3


@pytest.mark.parametrize("path", ["/rerank", "/invocations"])
def test_the_form_of_djl_and_text_embeddings_inference(
    encoder: FlaskClient, engine: FakeEngine, path: str
) -> None:
    body = {"query": "What?", "texts": ["a", "bb"], "raw_scores": True, "truncate": True}
    assert encoder.post(path, json=body).get_json() == [
        {"index": 1, "score": 0.2},
        {"index": 0, "score": 0.1},
    ]
    (job,) = jobs(engine)
    assert job.parameters == {"top_k": 2, "function_to_apply": "none", "truncation": True}
    (first, _) = encoder.post(path, json={**body, "return_text": True}).get_json()
    assert first["text"] == "bb"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(encoder: FlaskClient, path: str) -> None:
    def scores(first: object, second: object) -> list[float]:
        answer = encoder.post(path, json={"text_1": first, "text_2": second}).get_json()
        return [entry["score"] for entry in answer["data"]]

    assert scores("Q?", "a") == [0.1]
    assert scores("Q?", ["a", "bb"]) == [0.1, 0.2]
    assert scores(["Q?", "R?"], ["a", "bb"]) == [0.1, 0.2]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/rerank", {"query": "What?"}, "documents", "at least one text"),
        ("/v1/rerank", {**ASK, "query": ""}, "query", "at least one text"),
        ("/v1/rerank", {**ASK, "documents": [3]}, "documents", "list of strings"),
        ("/v1/rerank", {**ASK, "documents": ["a", ""]}, "documents", "no empty text"),
        ("/v1/rerank", {**ASK, "documents": ["a"] * 1025}, "documents", "at most 1024"),
        ("/v1/rerank", {**ASK, "top_n": -1}, "top_n", "from 0 to 2147483647"),
        ("/v1/rerank", {**ASK, "query": "What??"}, "model", "several labels"),
        ("/v1/rerank", {**ASK, "documents": ["a!"]}, "documents", "too long"),
        ("/v1/score", {"text_1": "a?", "text_2": "b!"}, "text_2", "too long"),
        ("/v1/score", {"text_1": ["a?", "b?"], "text_2": "c"}, "text_1", "expected one text"),
        ("/v1/score", {"text_1": "a?"}, "text_2", "at least one text"),
    ],
)
def test_invalid_requests(
    encoder: FlaskClient, path: str, body: object, param: str, message: str
) -> None:
    response = encoder.post(path, json=body)
    assert response.status_code == 400
    error = response.get_json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_bad_top_n_is_refused_before_the_model_runs(
    encoder: FlaskClient, engine: FakeEngine
) -> None:
    assert encoder.post("/v1/rerank", json={**ASK, "top_n": -1}).status_code == 400
    assert not jobs(engine)


def test_requests_may_name_an_adapter(
    encoder: FlaskClient, task_app: Serve, engine: FakeEngine
) -> None:
    lora = task_app("pipeline", enable_lora=True)
    assert lora.post("/adapters", json={"name": "a", "src": "/opt/ml/model/a"}).status_code == 200
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "a"}
    pair = {"text_1": "Q?", "text_2": "b"}
    texts = {"query": "Q?", "texts": ["b"]}
    single = {"inputs": {"text": "Q?", "text_pair": "b"}}
    for path, body, headers, variant in (
        ("/v1/rerank", {**ASK, "model": "a"}, {}, "a"),
        ("/v1/rerank", {**ASK, "model": "demo"}, {}, ""),
        ("/v1/rerank", {**ASK, "adapters": ""}, header, ""),
        ("/v1/score", {**pair, "model": "a"}, {}, "a"),
        ("/v1/score", pair, {}, ""),
        ("/rerank", {**texts, "model": "a"}, {}, "a"),
        ("/invocations", texts, header, "a"),
        ("/invocations", {**single, "adapters": "a"}, {}, "a"),
        ("/predict", {"inputs": ["Q?", "b"], "adapters": "a"}, {}, "a"),
    ):
        response = lora.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.get_data()
        (*_, job) = engine.of_type(Perform)
        assert isinstance(job, Perform)
        assert job.variant == variant
        if path.startswith("/v1"):
            assert response.get_json()["model"] == (variant or "demo")
    for path, body in (("/v1/rerank", ASK), ("/v1/score", pair), ("/rerank", texts)):
        assert lora.post(path, json={**body, "model": "b"}).status_code == 404
        # Without the option, the name of a model is ignored, and that of an adapter refused.
        assert encoder.post(path, json={**body, "model": "b"}).status_code == 200
        refused = encoder.post(path, json={**body, "adapters": "b"})
        assert refused.status_code == 400
        assert "option.enable_lora=true" in refused.get_data(as_text=True)


def test_models_for_other_tasks(task_app: Serve) -> None:
    response = task_app("pipeline", "fill-mask").post("/v1/rerank", json=ASK)
    assert response.status_code == 400
    assert "is for fill-mask" in response.get_json()["error"]["message"]


def test_predict_of_text_embeddings_inference(encoder: FlaskClient, engine: FakeEngine) -> None:
    """A list of two strings is a pair."""
    first, second = {"score": 0.1, "label": "L"}, {"score": 0.2, "label": "L"}
    body = {"inputs": [["Q?", "a"], ["Q?", "bb"]], "raw_scores": True, "truncate": True}
    assert encoder.post("/predict", json=body).get_json() == [[first], [second]]
    assert encoder.post("/predict", json={"inputs": ["Q?", "bb"]}).get_json() == [second]
    raw, usual = jobs(engine)
    assert raw.parameters == {"top_k": None, "function_to_apply": "none", "truncation": True}
    assert raw.inputs[1] == {"text": "Q?", "text_pair": "bb"}
    assert usual.parameters == {"top_k": None}
    for wrong in ([["a", "b", "c"]], [[]], [], ["a", ""], 3, [["Q?", "a!"]]):
        response = encoder.post("/predict", json={"inputs": wrong})
        assert response.status_code == 400
        assert response.get_json()["field"] == "inputs"
