"""Scores and labels with LoRA adapters equal those of models with merged weights."""

from __future__ import annotations

import shutil

import msgspec
import pytest
from transformers import AutoModelForSequenceClassification

from core.errors import ConfigurationError
from engine.lora.adapter_registry import AdapterRegistry
from engine.tasks.performer import Job
from tests.engine.lora.adapter_files import merged, write_adapter
from tests.engine.tasks.bodies import body, close
from tests.engine.tasks.conftest import decoded, engine_of, perform

KIND = AutoModelForSequenceClassification
TARGETS = ("query", "attn.q", "output.dense", "intermediate.dense")
PAIRS = [{"text": "the cat", "text_pair": text} for text in ("a dog", "it ran to the cat", "it")]


@pytest.mark.parametrize("name", ["reranker", "classifier", "mpnet"])
def test_requests_of_one_step_have_their_own_adapters(task_model, tmp_path, name):
    path = tmp_path / name
    shutil.copytree(task_model(name), path)
    asked = body(PAIRS, top_k=3, function_to_apply="none")
    expected = {"": decoded(perform(engine_of(path), asked)[0])}
    for seed, adapter in enumerate("ab"):
        folder = path / "adapters" / adapter
        write_adapter(path, folder, targets=TARGETS[seed:], rank=2 + seed, seed=seed, kind=KIND)
        whole = tmp_path / adapter
        shutil.copytree(task_model(name), whole)
        merged(path, folder, whole, KIND)
        expected[adapter] = decoded(perform(engine_of(whole), asked)[0])
    engine = engine_of(path, enable_lora=True)
    assert "loaded: a, b" in engine.facts.notes[-1]
    sizes = []
    engine.performer.model.model.register_forward_pre_hook(
        lambda model, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    registry = AdapterRegistry.of(engine.features)
    assert registry is not None
    order = ("a", "", "b", "a")
    data = msgspec.msgpack.encode(asked)
    jobs = [Job(data, parts=registry.parts(adapter)) for adapter in order]
    for adapter, outcome in zip(order, perform(engine, *jobs), strict=True):
        got = decoded(outcome)
        assert close(got, expected[adapter])
        assert not any(close(got, expected[other]) for other in expected.keys() - {adapter})
    assert sizes == [len(order) * len(PAIRS)]


def test_an_adapter_with_a_head_of_its_own_is_refused_by_name(task_model, tmp_path):
    path = tmp_path / "reranker"
    shutil.copytree(task_model("reranker"), path)
    write_adapter(
        path, path / "adapters" / "a", targets=TARGETS, kind=KIND, modules_to_save=["classifier"]
    )
    with pytest.raises(ConfigurationError, match=r"modules_to_save=\['classifier'\] cannot be"):
        engine_of(path, enable_lora=True)
