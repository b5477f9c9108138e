"""Fixtures: the application of several models. Its models are real processes that echo requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from gevent.event import Event

from container.multi_model.app import create_front
from container.multi_model.model_registry import ModelRegistry
from container.security.source_roots import SourceRoots
from tests.container.multi_model.fronts import FAKE, MakeModel, ServeModels


@pytest.fixture
def model_dir(tmp_path: Path) -> MakeModel:
    """Return a function that creates a model directory and returns its path."""

    def make(name: str, mode: str = "", **properties: object) -> str:
        path = tmp_path / name / "model"
        path.mkdir(parents=True)
        lines = [f"option.{key}={value}\n" for key, value in properties.items()]
        (path / "serving.properties").write_text("".join(lines))
        if mode:
            (path / "mode").write_text(mode)
        return str(path)

    return make


@pytest.fixture
def serve_models(tmp_path: Path, short_dir: Path) -> Iterator[ServeModels]:
    """Return a function that creates a client of the application. Its models stop with the test."""
    opened: list[ModelRegistry] = []

    def serve(*gpus: str, **variables: str) -> FlaskClient:
        models = ModelRegistry(short_dir, {"PYTHONPATH": ".", **variables}, FAKE, gpus=gpus)
        models.initial_models_loaded = True
        opened.append(models)
        sources, origin = SourceRoots([tmp_path]), variables.get("SERVING_CORS_ALLOWED_ORIGIN")
        return create_front(models, None, sources, origin).test_client()

    yield serve
    stop_now = Event()
    stop_now.set()
    for models in opened:
        models.stop(stop_now)
    assert list(short_dir.iterdir()) == [], "a socket file is left behind"


@pytest.fixture
def front(serve_models: ServeModels) -> FlaskClient:
    return serve_models()
