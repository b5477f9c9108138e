"""Adapter files that cannot be served are rejected with the reason, and nothing is loaded."""

from __future__ import annotations

import re

import pytest
import torch

from core.errors import RequestError
from tests.engine.lora.adapter_files import (
    adapted_llm,
    read_files,
    registry,
    write_adapter,
    write_files,
)


@pytest.fixture(scope="module")
def adapters(tiny_model):
    return registry(adapted_llm(tiny_model("llama"), max_loras=1).llm_engine)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA (use_dora) cannot be served; merge the adapter"),
        ({"bias": "all"}, "biases (bias, lora_bias) cannot"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] cannot"),
        ({"peft_type": "IA3"}, "peft_type IA3 cannot"),
        ({"alpha_pattern": {"q_proj": 1}}, "alpha_pattern cannot"),
        ({"init_lora_weights": "pissa_niter_4"}, "has changed the model's weights"),
        ({"lora_alpha": "x"}, "adapter_config.json: Expected `float`"),
    ],
)
def test_unsupported_configurations(adapters, tiny_model, tmp_path, config, reason):
    folder = write_adapter(tiny_model("llama"), tmp_path / "a", **{"alpha": 1})
    tensors, whole = read_files(folder)
    write_files(folder, tensors, **whole | config)
    with pytest.raises(RequestError) as caught:
        adapters.load("a", str(folder))
    assert reason in str(caught.value)
    assert caught.value.field == "src"
    assert not adapters.loaded


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "holds no tensors"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (2, 3)}, "of embeddings"),
        ({f"{LAYER}.lora_A.weight": (2, 32)}, "needs two matrices, lora_A and lora_B"),
        (
            {f"{LAYER}.lora_A.weight": (2, 31), f"{LAYER}.lora_B.weight": (32, 2)},
            "it was made for another model",
        ),
        (
            {f"{LAYER}.lora_A.weight": (2, 32), f"{LAYER}.lora_B.weight": (32, 3)},
            "it was made for another model",
        ),
        (
            {f"{LAYER}.lora_A.weight": (17, 32), f"{LAYER}.lora_B.weight": (32, 17)},
            "has rank 17, but option.max_lora_rank is 16; raise it",
        ),
        (
            {"base_model.model.lm_head.lora_A.weight": (2, 32),
             "base_model.model.lm_head.lora_B.weight": (97, 2)},
            "no layer 'lm_head' to adapt; its linear layers are down_proj, gate_proj, k_proj",
        ),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(adapters, tmp_path, tensors, reason):
    shaped = {key: torch.ones(shape) for key, shape in tensors.items()}
    folder = write_files(tmp_path / "a", shaped, r=2, lora_alpha=2)
    with pytest.raises(RequestError) as caught:
        adapters.load("a", str(folder))
    assert reason in str(caught.value)


def test_weights_that_are_not_finite_are_rejected(tiny_model, tmp_path):
    """Weights that overflow in the layers' dtype are rejected, too.

    An infinite weight of one adapter would affect requests with other adapters.
    """
    tensors, config = read_files(write_adapter(tiny_model("llama"), tmp_path / "a", rank=1))
    key = f"{LAYER}.lora_B.weight"
    tensors[key][0] = 7e4
    folder = write_files(tmp_path / "a", tensors, **config)
    registry(adapted_llm(tiny_model("llama"), dtype="bf16").llm_engine).load("a", str(folder))
    llm = adapted_llm(tiny_model("llama"), dtype="fp16")
    with pytest.raises(RequestError, match=r"layers\.0\.self_attn\.q_proj has values that are"):
        registry(llm.llm_engine).load("a", str(folder))


def test_a_directory_without_an_adapter(adapters, tmp_path):
    with pytest.raises(RequestError, match=r"adapter_config\.json cannot be read: No such file"):
        adapters.load("a", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 1}')
    with pytest.raises(RequestError, match=r"adapter_model\.safetensors cannot be read"):
        adapters.load("a", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RequestError, match=r"adapter_model\.safetensors cannot be read"):
        adapters.load("a", str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "layer"),
    [
        ("lfm2", "model.layers.0.conv.conv"),
        ("qwen3_5_text", "model.layers.0.linear_attn.conv1d"),
        ("mamba2", "backbone.layers.0.mixer.conv1d"),
    ],
)
def test_convolutions_of_layers_with_a_state_cannot_be_adapted(
    tiny_model, tmp_path, architecture, layer
):
    """PEFT adapts them, by tensors with an axis for the taps."""
    shapes = {f"{layer}.lora_A.weight": (2, 1, 4), f"{layer}.lora_B.weight": (64, 2, 1)}
    tensors = {f"base_model.model.{key}": torch.ones(shape) for key, shape in shapes.items()}
    folder = write_files(tmp_path / "a", tensors, r=2, lora_alpha=2)
    adapters = registry(adapted_llm(tiny_model(architecture), max_loras=1).llm_engine)
    expected = f"no layer '{re.escape(layer)}' to adapt; its linear layers are .*out_proj"
    with pytest.raises(RequestError, match=expected):
        adapters.load("a", str(folder))
