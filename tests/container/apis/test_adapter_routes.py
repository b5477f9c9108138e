"""LoRA adapters over HTTP, with a fake engine that only keeps a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from container.wire.engine_client import EngineClient
from core.protocol.messages import LoadAdapter, Submit, UnloadAdapter, Variant, Variants
from tests.container.conftest import Serve, eventually
from tests.container.fake_engine import FakeEngine

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
A = {"name": "a", "src": "/opt/ml/model/a"}
DESCRIBED = {**A, "preload": True, "pin": True}


@pytest.fixture
def lora(serve: Serve) -> FlaskClient:
    return serve(enable_lora=True)


def load(http: FlaskClient, name: str, **fields: object) -> TestResponse:
    return http.post("/adapters", json={"name": name, "src": f"/opt/ml/model/{name}", **fields})


def test_load_list_and_unload(lora: FlaskClient, engine: FakeEngine) -> None:
    assert lora.get("/adapters").get_json() == {"adapters": []}
    loaded = load(lora, "a", preload=False, pin=True)
    assert (loaded.status_code, loaded.get_json()) == (200, {"status": "Adapter a registered"})
    [received] = engine.of_type(LoadAdapter)
    assert isinstance(received, LoadAdapter)
    assert (received.name, received.src) == ("a", "/opt/ml/model/a")
    assert lora.get("/adapters").get_json() == {"adapters": [DESCRIBED]}
    assert lora.get("/adapters/a").get_json() == DESCRIBED
    unloaded = lora.delete("/adapters/a")
    assert (unloaded.status_code, unloaded.get_json()) == (
        200,
        {"status": "Adapter a unregistered"},
    )
    assert lora.get("/adapters").get_json() == {"adapters": []}
    assert len(engine.of_type(UnloadAdapter)) == 1


def test_the_alias_of_sagemaker_is_in_the_answers(lora: FlaskClient) -> None:
    headers = {"X-Amzn-SageMaker-Adapter-Alias": "Poems"}
    loaded = lora.post("/adapters?name=a&src=/opt/ml/model/a", headers=headers)
    assert loaded.get_json() == {"status": "Adapter Poems registered"}
    assert lora.get("/adapters/a").get_json() == DESCRIBED
    unloaded = lora.delete("/adapters/a", headers=headers)
    assert unloaded.get_json() == {"status": "Adapter Poems unregistered"}


def test_fields_may_be_query_parameters_as_in_djl_serving(lora: FlaskClient) -> None:
    query = "/adapters?name=a&src=/opt/ml/model/a&pin=true"
    assert lora.post(query).get_json() == {"status": "Adapter a registered"}
    assert lora.post("/adapters?name=b&src=/opt/ml/b&pin=maybe").get_json()["field"] == "pin"


def test_routes_of_lmi_below_the_model(lora: FlaskClient, engine: FakeEngine) -> None:
    """The requests come from LMI's own tests and from its description of /adapters."""
    path = "/models/demo/adapters"
    assert load(lora, "a").status_code == 200
    assert lora.post(f"{path}?name=b&src=/opt/ml/b").get_json() == {
        "status": "Adapter b registered"
    }
    assert [entry["name"] for entry in lora.get(path).get_json()["adapters"]] == ["a", "b"]
    assert lora.get(f"{path}/b").get_json()["src"] == "/opt/ml/b"
    for update in (f"{path}/b/update?pin=true", "/adapters/b/update?src=/opt/ml/b&preload=false"):
        assert lora.post(update).get_json() == {"status": "Adapter b updated"}
    other = lora.post(f"{path}/b/update?src=/c")
    assert (other.status_code, other.get_json()["field"]) == (400, "src")
    assert lora.post(f"{path}/x/update").status_code == 404
    assert lora.delete(f"{path}/b").get_json() == {"status": "Adapter b unregistered"}
    assert lora.get("/models/other/adapters").status_code == 404
    assert len(engine.of_type(LoadAdapter)) == 2


def test_vllms_routes(lora: FlaskClient) -> None:
    """The requests come from vLLM's documentation."""
    body = {"lora_name": "sql", "lora_path": "/opt/ml/sql"}
    loaded = lora.post("/v1/load_lora_adapter", json=body)
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert lora.get("/adapters/sql").get_json()["src"] == "/opt/ml/sql"
    missing = lora.post("/v1/load_lora_adapter", json={"lora_name": "x"}).get_json()["error"]
    assert missing["param"] == "lora_path"
    unload = {"lora_name": "sql", "lora_int_id": 3}
    assert lora.post("/v1/unload_lora_adapter", json=unload).text.startswith("Success: ")
    assert lora.post("/v1/unload_lora_adapter", json=unload).status_code == 404


def test_a_delete_without_a_name(lora: FlaskClient) -> None:
    """AWS's container standards (docs/reference/conformance.md) expect the status 405."""
    assert lora.delete("/adapters/").status_code == 405
    assert lora.get("/adapters/").status_code == 200


def test_names_may_have_slashes(lora: FlaskClient) -> None:
    assert load(lora, "team/a").status_code == 200
    assert lora.get("/adapters/team/a").get_json()["name"] == "team/a"
    assert lora.delete("/adapters/team/a").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/adapters?name=b&src=/opt/ml/b", b"x"),
        ("DELETE", "/adapters/a", b"x"),
    ],
)
def test_nothing_is_done_before_the_body_has_arrived(
    serve: Serve, engine: FakeEngine, method: str, path: str, body: bytes
) -> None:
    """A request whose body is refused must not load or unload the adapter."""
    http = serve(enable_lora=True, max_request_size=100)
    assert load(http, "a").status_code == 200
    num_received = len(engine.received)
    assert http.open(path, method=method, data=body * 101).status_code == 413
    assert engine.received[num_received:] == []


def test_statuses(lora: FlaskClient) -> None:
    assert lora.get("/adapters/a").status_code == 404
    assert lora.delete("/adapters/a").status_code == 404
    assert load(lora, "a").status_code == 200
    assert load(lora, "a").status_code == 409
    assert load(lora, "b").status_code == 200
    full = load(lora, "c")
    assert (full.status_code, full.get_json()["code"]) == (507, 507)
    assert "option.max_loras" in full.get_json()["error"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"src": "/a"}, "name"),
        ({"name": "", "src": "/a"}, "name"),
        ({"name": "a" * 257, "src": "/a"}, "name"),
        ({"name": "a\nb", "src": "/a"}, "name"),
        ({"name": "a\x1b", "src": "/a"}, "name"),
        ({"name": "demo", "src": "/a"}, "name"),
        ({"name": "a"}, "src"),
        ({"name": "a", "src": 1}, "src"),
        ({"name": "a", "src": "/a", "pin": "yes"}, "pin"),
        ({"name": "a", "src": "/a", "rank": 4}, "rank"),
    ],
)
def test_invalid_loads(lora: FlaskClient, engine: FakeEngine, body: object, field: str) -> None:
    response = lora.post("/adapters", json=body)
    assert (response.status_code, response.get_json()["field"]) == (400, field)
    assert not engine.of_type(LoadAdapter)


def test_adapters_loaded_by_other_workers_or_at_start_are_known(
    lora: FlaskClient, client: EngineClient, engine: FakeEngine
) -> None:
    adapter = Variant("b", "/opt/ml/b")
    engine.adapters["b"] = adapter
    engine.send(Variants((adapter,)))
    eventually(lambda: client.variants)
    assert [entry["name"] for entry in lora.get("/adapters").get_json()["adapters"]] == ["b"]
    newcomer = EngineClient(engine.endpoint, heartbeat_timeout_s=60)
    try:
        eventually(lambda: newcomer.health().healthy)
        assert newcomer.variants == (adapter,)
    finally:
        newcomer.close()


def test_answers_carry_the_digests_of_the_engine_and_of_the_adapter(
    lora: FlaskClient, engine: FakeEngine
) -> None:
    engine.send(Variants((Variant("a", "/a", "77aa"), Variant("b", "/b", "88bb"))))
    engine.adapters |= {"b": Variant("b", "/b", "88bb")}
    body = {**PROMPT, "model": "b"}
    eventually(lambda: lora.post("/v1/completions", json=body).headers["X-Longshore-Digest"][11:])
    answers = [lora.post("/v1/completions", json=sent) for sent in (PROMPT, body)]
    digests = [answer.headers["X-Longshore-Digest"] for answer in answers]
    assert digests == ["1f2e.plain", "1f2e.plain.88bb"]
    assert [answer.get_json()["system_fingerprint"] for answer in answers] == digests


def chosen(engine: FakeEngine) -> list[str]:
    """Return the adapters of all requests to the engine, in order."""
    return [message.variant for message in engine.of_type(Submit) if isinstance(message, Submit)]


CHAT = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 9}
PROMPT = {"prompt": "Q", "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "header", "expected"),
    [
        ("/invocations", {"inputs": "Q"}, None, [""]),
        ("/invocations", {"inputs": "Q", "adapters": "a"}, None, ["a"]),
        ("/invocations", {"inputs": "Q", "adapters": ""}, "a", [""]),
        ("/invocations", {"inputs": "Q"}, "a", ["a"]),
        ("/invocations", {"inputs": "Q", "adapters": "b"}, "a", ["b"]),
        ("/invocations", {"inputs": "Q", "model": "a"}, None, [""]),
        ("/invocations", {"inputs": ["Q", "R"], "adapters": "a"}, None, ["a", "a"]),
        ("/invocations", {"inputs": ["Q", "R", "S"], "adapters": ["a", "", "b"]}, None,
         ["a", "", "b"]),
        ("/invocations", {**CHAT, "model": "a"}, None, ["a"]),
        ("/invocations", {**CHAT, "adapters": "a"}, None, ["a"]),
        ("/invocations", {**CHAT, "adapters": ["a"], "model": "b"}, "b", ["a"]),
        ("/v1/completions", {**PROMPT, "adapters": "", "model": "b"}, None, [""]),
        ("/invocations", {**PROMPT, "model": "demo"}, "a", ["a"]),
        ("/v1/completions", {**PROMPT, "model": "demo"}, None, [""]),
        ("/v1/completions", {**PROMPT, "model": "a"}, None, ["a"]),
        ("/v1/completions", {**PROMPT, "model": "a"}, "b", ["b"]),
        ("/v1/completions", {**PROMPT, "prompt": ["Q", "R"], "model": "a"}, None, ["a", "a"]),
        ("/v1/chat/completions", {**CHAT, "model": "b"}, None, ["b"]),
        ("/v1/chat/completions", CHAT, None, [""]),
    ],
)  # fmt: skip
def test_ways_to_select_an_adapter(
    lora: FlaskClient,
    engine: FakeEngine,
    path: str,
    body: Mapping[str, object],
    header: str | None,
    expected: list[str],
) -> None:
    load(lora, "a")
    load(lora, "b")
    response = lora.post(path, json=body, headers={} if header is None else {HEADER: header})
    assert response.status_code == 200
    assert chosen(engine) == expected


def test_responses_name_their_adapter(lora: FlaskClient) -> None:
    load(lora, "a")
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        assert lora.post(path, json={**body, "model": "a"}).get_json()["model"] == "a"
        assert lora.post(path, json={**body, "model": "demo"}).get_json()["model"] == "demo"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"inputs": "Q", "adapters": "x"}),
        ("/v1/completions", {**PROMPT, "model": "x"}),
        ("/v1/chat/completions", {**CHAT, "model": "x"}),
    ],
)
def test_an_adapter_that_is_not_loaded(
    lora: FlaskClient, path: str, body: Mapping[str, object], stream: bool
) -> None:
    response = lora.post(path, json={**body, "stream": stream})
    assert response.status_code == 404
    assert "no adapter 'x'" in response.get_data(as_text=True)


def test_in_a_batch_only_the_inputs_with_a_missing_adapter_fail(lora: FlaskClient) -> None:
    load(lora, "a")
    body = {"inputs": ["Q", "R"], "adapters": ["a", "x"]}
    good, bad = lora.post("/invocations", json=body).get_json()
    assert good == {"generated_text": "Hi there"}
    assert bad["code"] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"inputs": "Q", "adapters": ["a"]}, "adapters"),
        ({"inputs": ["Q", "R"], "adapters": ["a"]}, "adapters"),
        ({"inputs": "Q", "adapters": 1}, "adapters"),
        ({"inputs": "Q", "parameters": {"adapter_id": "a"}}, "parameters.adapter_id"),
        ({**PROMPT, "model": 1}, "model"),
        ({**CHAT, "adapters": ["a", "b"]}, "adapters"),
    ],
)
def test_invalid_ways_to_select_an_adapter(
    lora: FlaskClient, body: Mapping[str, object], field: str
) -> None:
    response = lora.post("/invocations", json=body)
    assert (response.status_code, response.get_json()["field"]) == (400, field)


def test_models_lists_the_adapters(lora: FlaskClient) -> None:
    load(lora, "a")
    model, adapter = lora.get("/v1/models").get_json()["data"]
    assert (model["id"], adapter["id"]) == ("demo", "a")
    assert (adapter["root"], adapter["parent"]) == ("/opt/ml/model/a", "demo")
    assert lora.get("/v1/models/a").get_json() == adapter
    assert lora.get("/v1/models/x").status_code == 404


def test_adapters_are_rejected_and_model_names_ignored_unless_lora_is_enabled(
    http: FlaskClient, engine: FakeEngine
) -> None:
    def field(response: TestResponse) -> Any:
        assert response.status_code == 400
        assert "option.enable_lora=true" in response.get_json()["error"]
        return response.get_json()["field"]

    assert field(load(http, "a")) == "adapters"
    assert field(http.get("/adapters")) == "adapters"
    assert field(http.delete("/adapters/a")) == "adapters"
    assert field(http.post("/invocations", json={"inputs": "Q", "adapters": "a"})) == "adapters"
    by_header = http.post("/invocations", json={"inputs": "Q"}, headers={HEADER: "a"})
    assert field(by_header) == HEADER
    assert http.post("/v1/completions", json={**PROMPT, "model": "x"}).status_code == 200
    assert chosen(engine) == [""]


@pytest.mark.parametrize("src", ["/etc", "/opt/ml/../../etc", "relative"])
def test_an_adapter_outside_the_source_roots_is_refused(
    lora: FlaskClient, engine: FakeEngine, src: str
) -> None:
    response = lora.post("/adapters", json={"name": "a", "src": src})
    assert (response.status_code, response.get_json()["field"]) == (400, "src")
    assert engine.of_type(LoadAdapter) == []
