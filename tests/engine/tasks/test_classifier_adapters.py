"""Scores and labels with LoRA adapters equal those of models with merged weights."""

from __future__ import annotations

import shutil

import msgspec
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from core.errors import ConfigurationError
from engine.lora.adapter_registry import AdapterRegistry
from engine.tasks.performer import Job
from tests.engine.lora.adapter_files import merged, read_files, write_adapter, write_files
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


HEADS = {
    "classifier": ("classifier.weight", "classifier.bias"),
    "roberta-classifier": (
        "classifier.dense.weight",
        "classifier.dense.bias",
        "classifier.out_proj.weight",
        "classifier.out_proj.bias",
    ),
    "score": ("score.weight",),
}
"""The tensors of a model's head, as PEFT names them after `base_model.model.`"""


def add_head(path, folder, names, seed, **config):
    """Give the adapter in `folder` random tensors of these names, shaped as the model's."""
    tensors, whole = read_files(folder)
    model = KIND.from_pretrained(path)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        shape = model.get_parameter(name).shape
        size = 1 / shape[-1] ** 0.5
        tensors[f"base_model.model.{name}"] = torch.randn(shape, generator=generator) * size
    write_files(folder, tensors, **whole | {"task_type": "SEQ_CLS"} | config)


@pytest.mark.parametrize("name", HEADS)
def test_each_row_has_the_head_of_its_own_adapter(task_model, tmp_path, name):
    """Adapters a and b have heads, as PEFT's versions save them, and c has the model's."""
    path = tmp_path / name
    shutil.copytree(task_model(name), path)
    asked = body(PAIRS, top_k=3, function_to_apply="none")
    expected = {"": decoded(perform(engine_of(path), asked)[0])}
    targets = ("q_proj", "down_proj") if name == "score" else TARGETS
    saved: tuple = ({"modules_to_save": ["classifier", "score"]}, {"modules_to_save": None})
    for seed, adapter in enumerate("abc"):
        folder = path / "adapters" / adapter
        write_adapter(path, folder, targets=targets, rank=2, seed=seed, kind=KIND)
        if adapter != "c":
            add_head(path, folder, HEADS[name], seed, **saved[seed])
        whole = tmp_path / adapter
        shutil.copytree(task_model(name), whole)
        merged(path, folder, whole, KIND)
        expected[adapter] = decoded(perform(engine_of(whole), asked)[0])
    rename(path / "adapters" / "b", "modules_to_save.default")
    engine = engine_of(path, enable_lora=True)
    registry = AdapterRegistry.of(engine.features)
    assert registry is not None
    for adapter in "ab":  # nothing in use may be a view of the file
        weights = path / "adapters" / adapter / "adapter_model.safetensors"
        with weights.open("r+b") as file:
            file.write(bytes(weights.stat().st_size))
    order = ("a", "", "b", "c", "a")
    data = msgspec.msgpack.encode(asked)
    jobs = [Job(data, parts=registry.parts(adapter)) for adapter in order]
    for adapter, outcome in zip(order, perform(engine, *jobs), strict=True):
        got = decoded(outcome)
        assert close(got, expected[adapter])
        assert not any(close(got, expected[other]) for other in expected.keys() - {adapter})
    registry.unload("a")
    registry.load("again", str(path / "adapters" / "c"))  # in the slot of a head
    (outcome,) = perform(engine, Job(data, parts=registry.parts("again")))
    assert close(decoded(outcome), expected["c"])
    (outcome,) = perform(engine, asked)
    assert close(decoded(outcome), expected[""])


def rename(folder, infix):
    """Name the head's tensors as a state of PEFT's model does."""
    tensors, config = read_files(folder)
    for key in [key for key in tensors if ".lora_" not in key]:
        head, _, rest = key.removeprefix("base_model.model.").partition(".")
        tensors[f"base_model.model.{head}.{infix}.{rest}"] = tensors.pop(key)
    write_files(folder, tensors, **config)


HEAD = "base_model.model.classifier"


@pytest.mark.parametrize(
    ("changed", "saved", "reason"),
    [
        ({f"{HEAD}.weight": (5, 16), f"{HEAD}.bias": (5,)}, ["classifier"],
         r"classifier.weight is \[5, 16\], but the model's is \[3, 16\]: .* num_labels, or merge"),
        ({f"{HEAD}.bias": (3, 1)}, ["classifier"], r"classifier.bias is \[3, 1\], but .* \[3\]"),
        ({f"{HEAD}.bias": None}, None, r"lacks classifier.bias, a part of the head"),
        ({f"{HEAD}.weight": None, f"{HEAD}.bias": None}, ["classifier", "score"],
         r"lacks classifier.weight, a part of the head"),
        ({}, ["classifier", "pooler"], r"modules_to_save=\['pooler'\] cannot be served; merge"),
        ({}, [""], r"modules_to_save=\[''\] cannot be served; merge"),
        ({"base_model.model.bert.pooler.dense.weight": (16, 16)}, ["classifier"],
         r"'base_model.model.bert.pooler.dense.weight' is not in a linear layer"),
        ({f"{HEAD}.more": (3,)}, ["classifier"], r"classifier.more' is not in a linear layer"),
        ({f"{HEAD}.lora_A.weight": (2, 16), f"{HEAD}.lora_B.weight": (3, 2)}, ["classifier"],
         "no layer 'classifier' to adapt"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused_by_name(task_model, tmp_path, changed, saved, reason):
    path = tmp_path / "classifier"
    shutil.copytree(task_model("classifier"), path)
    folder = path / "adapters" / "a"
    write_adapter(path, folder, targets=TARGETS, kind=KIND)
    add_head(path, folder, HEADS["classifier"], 1, modules_to_save=saved)
    tensors, config = read_files(folder)
    for key, shape in changed.items():
        if shape is None:
            del tensors[key]
        else:
            tensors[key] = torch.ones(shape)
    write_files(folder, tensors, **config)
    with pytest.raises(ConfigurationError, match=reason):
        engine_of(path, enable_lora=True)


def test_heads_with_values_that_are_not_finite_are_refused(task_model, tmp_path):
    path = tmp_path / "classifier"
    shutil.copytree(task_model("classifier"), path)
    folder = path / "adapters" / "a"
    write_adapter(path, folder, targets=TARGETS, kind=KIND)
    add_head(path, folder, HEADS["classifier"], 1)
    tensors, config = read_files(folder)
    tensors[f"{HEAD}.bias"][0] = float("nan")
    write_files(folder, tensors, **config)
    with pytest.raises(ConfigurationError, match=r"classifier.bias has values that are not finite"):
        engine_of(path, enable_lora=True)


@pytest.mark.parametrize("name", ["encoder", "llama"])
def test_embedders_have_no_head_to_replace(task_model, tmp_path, name):
    path = tmp_path / name
    shutil.copytree(task_model(name), path)
    write_adapter(
        path,
        path / "adapters" / "a",
        targets=("query", "q_proj"),
        kind=AutoModel,
        modules_to_save=["classifier", "score"],
    )
    with pytest.raises(ConfigurationError, match=r"\['classifier', 'score'\] cannot be served"):
        engine_of(path, task="embed", enable_lora=True)
