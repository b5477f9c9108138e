"""Embeddings with LoRA adapters equal those of models with merged weights."""

from __future__ import annotations

import queue
import shutil
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoModel

from core.errors import ConfigurationError
from core.protocol.messages import (
    Failed,
    LoadAdapter,
    Perform,
    Performed,
    UnloadAdapter,
    Variants,
)
from engine import LLM, LoRARequest
from engine.lora.adapter_registry import AdapterRegistry
from engine.serve.task_service import TaskService
from engine.tasks.performer import Job
from tests.engine.lora import adapter_files
from tests.engine.lora.adapter_files import write_adapter
from tests.engine.tasks.conftest import engine_of, perform
from tests.engine.tasks.embedding.vectors import TEXTS, embed, hidden, unit, vectors

TARGETS = {
    "encoder": ("query", "value", "attention.output.dense", "intermediate.dense"),
    "llama": ("q_proj", "v_proj", "gate_proj", "down_proj"),
}


def means(path):
    return np.stack([unit(hidden(path, text).mean(0)) for text in TEXTS])


@pytest.fixture
def adapted(task_model, tmp_path):
    """Return a function architecture → (model with adapters a and b, vectors by adapter)."""

    def make(name):
        path = tmp_path / name
        shutil.copytree(task_model(name), path)
        expected = {"": means(path)}
        for seed, adapter in enumerate("ab"):
            folder = path / "adapters" / adapter
            targets = TARGETS[name][seed:]
            write_adapter(path, folder, targets=targets, rank=2 + seed, seed=seed, kind=AutoModel)
            whole = adapter_files.merged(path, folder, tmp_path / f"{name}-{adapter}", AutoModel)
            expected[adapter] = means(whole)
        return path, expected

    return make


def jobs(engine, *adapters):
    """Return a request of all texts for each adapter."""
    registry = AdapterRegistry.of(engine.features)
    assert registry is not None
    body = msgspec.msgpack.encode(embed(*TEXTS))
    return [Job(body, parts=registry.parts(adapter)) for adapter in adapters]


@pytest.mark.parametrize("name", ["encoder", "llama"])
def test_requests_of_one_step_have_their_own_adapters(adapted, name):
    path, expected = adapted(name)
    engine = engine_of(path, task="embed", enable_lora=True)
    assert "loaded: a, b" in engine.facts.notes[-1]
    sizes = []
    engine.performer.model.register_forward_pre_hook(
        lambda model, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    order = ("a", "", "b", "a")
    for adapter, outcome in zip(order, perform(engine, *jobs(engine, *order)), strict=True):
        got, _ = vectors(outcome)
        np.testing.assert_allclose(got, expected[adapter], atol=2e-5)
        others = [each for other, each in expected.items() if other != adapter]
        assert all(np.abs(got - other).max() > 0.02 for other in others)
    assert sizes == [len(order) * len(TEXTS)]


def test_offline(adapted):
    """An adapter is loaded when a prompt first names it."""
    path, expected = adapted("encoder")
    kept = path.parent / "kept"
    shutil.move(path / "adapters", kept)
    llm: Any = LLM(path, dtype="fp32", device="cpu", enable_lora=True, max_loras=1)
    for name in "aba":
        wanted = [LoRARequest(name, 1, str(kept / name)), None, None, None]
        outputs = llm.embed(TEXTS, use_tqdm=False, lora_request=wanted)
        got = np.array([output.outputs.embedding for output in outputs])
        whole = np.concatenate([expected[name][:1], expected[""][1:]])
        np.testing.assert_allclose(got, whole, atol=2e-5)


def test_models_and_tasks_without_adapters(task_model):
    with pytest.raises(ConfigurationError, match=r"need Longshore's own layers .*code .t5"):
        engine_of(task_model("t5"), task="embed", enable_lora=True)
    with pytest.raises(ConfigurationError, match="but the model has sparse ones; leave"):
        engine_of(task_model("filler"), task="embed", pooling="splade", enable_lora=True)
    with pytest.raises(
        ConfigurationError, match="only for text generation, text-embedding, text-clas"
    ):
        engine_of(task_model("tagger"), enable_lora=True)
    assert not engine_of(task_model("encoder")).features


class Wire:
    """Keeps the messages of a service."""

    def __init__(self):
        self.inbox = queue.SimpleQueue()
        self.sent = []

    def send(self, client, message):
        self.sent.append(message)
        return True

    def broadcast(self, message):
        self.sent.append(message)


def test_adapters_are_loaded_and_unloaded_while_requests_run(adapted):
    """A request that runs keeps its adapter, and its slot."""
    path, expected = adapted("encoder")
    kept = path.parent / "kept"
    shutil.move(path / "adapters", kept)
    engine = engine_of(path, enable_lora=True, max_loras=1, max_rolling_batch_prefill_tokens=8)
    wire = Wire()
    service = TaskService(engine, wire)
    sent = wire.sent

    def load(name):
        service.handle(b"c", LoadAdapter(f"load-{name}", name, str(kept / name)))
        if not sent:
            service.handle(*wire.inbox.get(timeout=60))

    def add(variant):
        body = msgspec.msgpack.encode(embed(*TEXTS))
        return service.add(Perform("p", body, variant=variant), 0.0, lambda message: True)

    load("a")
    assert [type(message) for message in sent] == [Variants, Performed]
    assert [variant.name for variant in service.ready().variants] == ["a"]
    first = add("a")
    assert engine.advance(0.0) == []
    service.handle(b"c", UnloadAdapter("u", "a"))
    sent.clear()
    load("b")
    assert isinstance(sent[0], Failed)
    assert sent[0].kind == "no_room"
    with pytest.raises(Exception, match="no adapter 'a' is loaded"):
        add("a")
    outputs = [output for _ in TEXTS for output in engine.advance(0.0)]
    assert [output.request_id for output in outputs] == [first]
    np.testing.assert_allclose(vectors(outputs[0].outcome)[0], expected["a"], atol=2e-5)
    sent.clear()
    load("b")
    second = add("b")
    outputs = [output for _ in TEXTS for output in engine.advance(0.0)]
    assert [output.request_id for output in outputs] == [second]
    np.testing.assert_allclose(vectors(outputs[0].outcome)[0], expected["b"], atol=2e-5)


def test_without_the_option_adapters_are_refused(task_model):
    wire = Wire()
    service = TaskService(engine_of(task_model("encoder")), wire)
    service.handle(b"c", LoadAdapter("l", "a", "/src"))
    (failed,) = wire.sent
    assert (failed.kind, failed.field) == ("rejected", "adapters")
    assert "option.enable_lora=true" in failed.message
