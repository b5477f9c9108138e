"""Texts with LoRA adapters get the hidden states of models with merged weights."""

from __future__ import annotations

import pytest
import torch

from core.configuration.options import LoraOptions
from engine.encoder.families import FAMILIES
from engine.encoder.one_call import OneCall
from engine.encoder.own_layers import own_encoder, use_own_layers
from engine.lora.files import AdapterWeights, LayerWeights
from engine.lora.start import start_adapters
from tests.engine.encoder.test_own_layers import batch, make, outputs, source_of

TEXTS = ("a", "", "b", "a", "")
"""The adapter of each text; '': none."""


def weights_of(sizes, rank, seed):
    """Return an adapter for all layers."""
    torch.manual_seed(seed)
    layers = {}
    for name, size in sizes.items():
        a = torch.randn(rank, size.in_features) / size.in_features**0.5
        layers[name] = LayerWeights(a, 0.3 * torch.randn(size.out_features, rank))
    return AdapterWeights(layers)


@torch.no_grad()
def merged(name, weights):
    """Return transformers' model with an adapter in its weights, by transformers' names."""
    model = make(name)
    for layer, factors in weights.layers.items():
        model.get_submodule(layer).weight += factors.b @ factors.a
    return model


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_each_text_has_its_own_adapter(tmp_path, monkeypatch, name):
    model = make(name)
    inputs = batch(has_types=False)
    plain = outputs(model, inputs)
    use_own_layers(model, source_of(model, tmp_path), "x")
    own = own_encoder(model)
    assert own is not None
    registry, _ = start_adapters(
        own, tmp_path, LoraOptions(enable_lora=True, max_loras=2, max_lora_rank=4)
    )
    expected = {"": plain}
    for adapter, rank in (("a", 3), ("b", 4)):
        weights = weights_of(registry.memory.sizes, rank, seed=rank)
        registry.reserve(adapter)
        registry.install(adapter, "", weights)
        expected[adapter] = outputs(merged(name, weights), inputs)
    is_of = torch.repeat_interleave(torch.arange(len(TEXTS)), inputs["attention_mask"].sum(1))
    got = outputs(model, inputs | {"parts": [registry.parts(adapter) for adapter in TEXTS]})
    for text, adapter in enumerate(TEXTS):
        rows = is_of == text
        torch.testing.assert_close(got[rows], expected[adapter][rows], atol=5e-5, rtol=1e-4)
        others = [states for other, states in expected.items() if other != adapter]
        assert all((got[rows] - states[rows]).abs().max() > 0.05 for states in others)
    calls = []
    usual = OneCall.__call__
    monkeypatch.setattr(OneCall, "__call__", lambda *args: calls.append(1) or usual(*args))
    torch.testing.assert_close(outputs(model, inputs), plain, atol=2e-5, rtol=1e-4)
    assert calls, "texts without adapters run as if there were none"
