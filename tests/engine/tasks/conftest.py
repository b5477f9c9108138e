"""Tiny models for tasks, built once per session, and engines for them and for handlers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from core.configuration.options import make_options
from core.configuration.task import Task, choose_task
from core.protocol.task_bodies import EmbeddingBody, PipelineBody
from engine.tasks.build import build_task_engine
from engine.tasks.engine import TaskEngine
from engine.tasks.performer import Answer, Job, Outcome
from tests.engine.tasks.models import save_task_model

TaskModelDir = Callable[[str], Path]


@pytest.fixture(scope="session")
def task_model(tmp_path_factory) -> TaskModelDir:
    """Return a function name → folder of a tiny random model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("task-models")
    return lambda name: save_task_model(name, folder)


def engine_of(path: Path, **options: Any) -> Any:
    """Return an engine whose batches never wait."""
    all_options = make_options({"dtype": "fp32", "device": "cpu", "max_batch_delay": 0} | options)
    return build_task_engine(choose_task(path, all_options), path, all_options)


def perform(engine: TaskEngine, *bodies: PipelineBody | EmbeddingBody | Job) -> list[Any]:
    """Perform the bodies and return their outcomes in order."""
    jobs = [body if isinstance(body, Job) else Job(msgspec.msgpack.encode(body)) for body in bodies]
    ids = [engine.add(job, 0.0) for job in jobs]
    outcomes: dict[int, Outcome] = {}
    while engine.has_work():
        for output in engine.advance(1.0):
            assert output.request_id not in outcomes, "one outcome per body"
            outcomes[output.request_id] = output.outcome
    return [outcomes[id] for id in ids]


def decoded(outcome: Outcome) -> Any:
    """Return the parsed JSON of an answer."""
    assert isinstance(outcome, Answer), outcome
    return msgspec.json.decode(outcome.body)


@pytest.fixture
def handler(monkeypatch, tmp_path):
    """Return a function (code, properties=None, **options) → the engine of a model.py.

    Restores sys.path and the working directory, which a handler changes.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def make(code, properties=None, **options):
        path = tmp_path / "model.py"
        path.write_text(code)
        task = Task(kind="handler", name=str(path), properties=properties or {})
        options = {"max_batch_delay": 0, "device": "cpu"} | options
        return build_task_engine(task, tmp_path, make_options(options))

    yield make
    for name in set(sys.modules) - before:
        if name in ("model", "helper"):
            del sys.modules[name]


def job(body, send=None, **headers):
    """Return a request to a handler."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    return Job(data, headers) if send is None else Job(data, headers, send)
