"""The OpenAPI document is what is served, and no request it allows, or nearly does, is a 5xx."""

from __future__ import annotations

import re

import hypothesis
import pytest
import schemathesis
from flask.testing import FlaskClient
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from container.openapi import openapi_document
from tests.container.conftest import Serve


def test_every_route_is_in_the_document(serve: Serve) -> None:
    for with_runtime in (False, True):
        http = serve(local_runtime_api=with_runtime)
        document = http.get("/openapi.json").get_json()
        assert document == openapi_document(with_runtime=with_runtime)
        served = {
            (re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule), method.lower())
            for rule in http.application.url_map.iter_rules()
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        }
        described = {(path, method) for path, item in document["paths"].items() for method in item}
        assert served - {("/ping", "post")} == described


def test_it_says_what_the_tables_say(http: FlaskClient) -> None:
    schemas = http.get("/openapi.json").get_json()["components"]["schemas"]
    assert schemas["Parameters"]["properties"]["top_k"]["anyOf"][0]["type"] == "integer"
    assert "Not served" in schemas["Chat"]["properties"]["modalities"]["description"]


OPERATIONS = [
    (path, method)
    for path, item in openapi_document(with_runtime=True)["paths"].items()
    for method in item
]


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_is_a_server_error(
    serve: Serve, path: str, method: str, mode: GenerationMode
) -> None:
    """Of the requests that the document allows, and of those that it does not."""
    app = serve(local_runtime_api=True, tool_call_parser="hermes").application
    schema = schemathesis.openapi.from_wsgi("/openapi.json", app)

    @hypothesis.settings(
        max_examples=20,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=schema[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        statuses.add(case.call_and_validate(checks=[not_a_server_error]).status_code)

    statuses: set[int] = set()
    try:
        check()
    except hypothesis.errors.Unsatisfiable:
        assert method == "get", "only where nothing is taken can nothing be wrong"
    else:
        names_a_model = "{model}" in path or path == "/v1/models/{name}"
        expects_success = mode == GenerationMode.POSITIVE and not names_a_model
        assert 200 in statuses or not expects_success, "the document allows what is served"
