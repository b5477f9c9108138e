"""Helpers for requests with LMI's text schema."""

from __future__ import annotations

import json
from typing import Any

from flask.testing import FlaskClient
from werkzeug.test import TestResponse


def invoke(http: FlaskClient, inputs: str = "Q", **parameters: object) -> TestResponse:
    return http.post("/invocations", json={"inputs": inputs, "parameters": parameters})


def stream(http: FlaskClient, accept: str = "", **parameters: object) -> TestResponse:
    headers = {"Accept": accept} if accept else {}
    body = {"inputs": "Q", "parameters": parameters, "stream": True}
    return http.post("/invocations", json=body, headers=headers)


def records(response: TestResponse) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.get_data().splitlines()]
