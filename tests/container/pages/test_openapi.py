"""The OpenAPI document matches the routes, and valid or nearly valid requests give no 5xx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
from flask.testing import FlaskClient
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from container.apis.invocations.upgrade import PATH as UPGRADE_PATH
from container.apis.openapi import openapi_document
from container.apis.table import contract_of
from container.front_end.app import create_task_app
from container.multi_model.app import CONTRACT, create_front
from container.multi_model.model_registry import ModelRegistry
from container.wire.engine_client import EngineClient
from core.configuration.options import ServerOptions, make_options
from core.configuration.pipeline_tasks import SPEECH_RECOGNITION
from core.configuration.task import Kind, Task
from core.protocol.messages import Perform, Performed
from core.protocol.task_bodies import TRANSCRIPTION, EmbeddingAnswer, Transcript
from tests.container.conftest import Serve
from tests.container.fake_engine import FakeEngine, performs

SETTINGS = hypothesis.settings(
    max_examples=12,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def serve_task(client: EngineClient, engine: FakeEngine) -> Serve:
    """Return a function that makes a test client for a kind of task. The engine always succeeds."""

    def answer(job: Perform) -> Performed:
        if job.headers:
            return Performed(job.id, b"{}", "application/json")
        body = msgspec.msgpack.decode(job.body)
        if TRANSCRIPTION in body.get("parameters", {}):
            return Performed(job.id, msgspec.json.encode(Transcript("a", 1.0)), "application/json")
        count = len(body["inputs"])
        if "is_batch" in body and isinstance(body["inputs"][0], dict):
            scores = msgspec.json.encode([[{"label": "a", "score": 0.5}]] * count)
            return Performed(job.id, scores, "application/json")
        embedded = msgspec.msgpack.encode(EmbeddingAnswer([bytes(8)] * count, [1] * count))
        return Performed(job.id, embedded if "field" in body else b"{}", "application/json")

    def serve(kind: Kind, name: str = "text-classification", **options: Any) -> FlaskClient:
        engine.script = performs(answer)
        task = Task(kind=kind, name=name)
        return create_task_app(client, make_options(options), "demo", task).test_client()

    return serve


PAGE = {("/", "get"), ("/ui/events", "get"), ("/ui/{name}", "get")}
NOT_DESCRIBED = {("/ping", "post"), ("/models", "post"), ("/models/{name}", "delete"), *PAGE}
"""Routes that the document omits. The /models routes among them only answer that they are not
supported. The live page is no API.
"""


def check_routes(http: FlaskClient) -> None:
    """Check that the document has exactly the served routes."""
    served = {
        (re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule), method.lower())
        for rule in http.application.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    document = http.get("/openapi.json").get_json()
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    aliases = {(f"/openai{path}", method) for path, method in served if path.startswith("/v1/")}
    assert aliases <= served
    assert served - aliases - NOT_DESCRIBED == described


@pytest.mark.parametrize("with_runtime", [False, True])
def test_every_route_is_in_the_document(
    serve: Serve, serve_task: Serve, with_runtime: bool
) -> None:
    http = serve(local_runtime_api=with_runtime)
    contract = contract_of("generation", ServerOptions(local_runtime_api=with_runtime))
    assert http.get("/openapi.json").get_json() == openapi_document(contract)
    check_routes(http)
    for kind in TASKS:
        check_routes(serve_task(kind, local_runtime_api=with_runtime))


def test_the_document_of_the_multi_model_server(tmp_path: Path) -> None:
    app = create_front(ModelRegistry(tmp_path, {}))
    document = app.test_client().get("/openapi.json").get_json()
    assert document == openapi_document(CONTRACT)
    adapter = app.url_map.bind("localhost")
    for path, item in document["paths"].items():
        for method in item:
            adapter.match(path.replace("{name}", "x"), method.upper())
    assert document["components"]["schemas"]["Load"]["required"] == ["model_name", "url"]


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_load_requests_give_no_server_error(
    tmp_path: Path, mode: GenerationMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # hypothesis also tries strings from our source code, such as models/demo. There is no such
    # model below tmp_path.
    monkeypatch.chdir(tmp_path)
    schema = schemathesis.openapi.from_wsgi(
        "/openapi.json", create_front(ModelRegistry(tmp_path, {}))
    )

    @SETTINGS
    @hypothesis.given(case=schema["/models"]["POST"].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        statuses.add(case.call_and_validate(checks=[not_a_server_error]).status_code)

    statuses: set[int] = set()
    check()
    assert 400 in statuses, "the directory does not exist or the body is invalid"


def test_the_document_has_types_and_names_unsupported_fields(http: FlaskClient) -> None:
    schemas = http.get("/openapi.json").get_json()["components"]["schemas"]
    assert schemas["Parameters"]["properties"]["top_k"]["anyOf"][0]["type"] == "integer"
    assert "Not supported" in schemas["Chat"]["properties"]["modalities"]["description"]


TASKS: tuple[Kind, ...] = ("embedding", "pipeline", "handler")
OPERATIONS = [
    (kind, path, method)
    for kind in ("generation", *TASKS)
    for contract in [contract_of(kind, ServerOptions(local_runtime_api=kind == "generation"))]
    for path, item in openapi_document(contract)["paths"].items()
    for method in item
    if kind == "generation" or method == "post"
]


@pytest.mark.matrix(cases=16)
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("kind", "path", "method"), OPERATIONS)
def test_requests_give_no_server_error(
    serve: Serve,
    serve_task: Serve,
    engine: FakeEngine,
    kind: Kind,
    path: str,
    method: str,
    mode: GenerationMode,
) -> None:
    """Neither valid nor invalid requests give a server error."""
    engine.max_loras = 1000  # a full engine would answer 507
    options: dict[str, Any] = {"enable_lora": "adapter" in path, "source_roots": "/"}
    if kind == "generation":
        app = serve(local_runtime_api=True, tool_call_parser="hermes", **options).application
    else:
        name = SPEECH_RECOGNITION if "/audio/" in path else "text-classification"
        app = serve_task(kind, name, **options).application
    schema = schemathesis.openapi.from_wsgi("/openapi.json", app)

    def check(case: schemathesis.Case) -> None:
        statuses.add(case.call_and_validate(checks=[not_a_server_error]).status_code)

    given = hypothesis.given(case=schema[path][method].as_strategy(generation_mode=mode))
    names_a_model = "{model}" in path or path.endswith("/models/{name}")
    names_an_adapter = path.endswith(("/{name}", "/{name}/update", "/unload_lora_adapter"))
    names_either = names_a_model or names_an_adapter
    # No model or adapter has the name that hypothesis makes up, and no request asks for an upgrade.
    cannot_succeed = names_either or path == UPGRADE_PATH
    expects_success = mode == GenerationMode.POSITIVE and not cannot_succeed
    statuses: set[int] = set()
    try:
        SETTINGS(given(check))()
        if expects_success and 200 not in statuses:
            # hypothesis also tries constants from all loaded modules. They may use up the first
            # run's examples.
            hypothesis.settings(SETTINGS, max_examples=200)(given(check))()
    except hypothesis.errors.Unsatisfiable:
        has_no_invalid_request = method in ("get", "delete") or kind == "handler"
        assert has_no_invalid_request, "other routes have invalid requests"
    else:
        assert 200 in statuses or not expects_success, "no valid request succeeds"
