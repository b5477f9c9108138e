"""Requests to the application of several models, shared by its tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flask.testing import FlaskClient

FAKE = (sys.executable, "-m", "tests.container.multi_model.fake_model")
TARGET = "X-Amzn-SageMaker-Target-Model"

MakeModel = Callable[..., str]
ServeModels = Callable[..., FlaskClient]


def load(http: FlaskClient, name: str, url: str, *, status: int = 200) -> dict[str, Any]:
    response = http.post("/models", json={"model_name": name, "url": url})
    assert response.status_code == status, response.get_data()
    return response.get_json()


def names(http: FlaskClient, query: str = "") -> list[str]:
    return [model["modelName"] for model in http.get(f"/models{query}").get_json()["models"]]
