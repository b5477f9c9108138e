"""The linear layers of sentence-transformers after the pooling equal plain torch's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from core.errors import ConfigurationError
from tests.engine.tasks.conftest import engine_of, perform
from tests.engine.tasks.embedding.vectors import TEXTS, embed, hidden, unit, vectors

TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
WIDTH = 16
"""That of the model's vectors."""


def write_layer(folder, sizes, activation, *, has_bias=True, is_saved=True, **config):
    """Write a module with a random layer, [in, out], and return the layer."""
    torch.manual_seed(sum(sizes))
    layer = nn.Linear(*sizes, bias=has_bias)
    settings = {"in_features": sizes[0], "out_features": sizes[1], "bias": has_bias,
                "activation_function": activation} | config  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    if is_saved:
        tensors = {f"linear.{name}": part.detach() for name, part in layer.named_parameters()}
        save_file(tensors, folder / "model.safetensors")
    return layer


def means(path):
    return np.stack([hidden(path, text).mean(0) for text in TEXTS])


@pytest.mark.parametrize("is_unit", [True, False])
def test_layers_follow_the_pooling(described, is_unit):
    """They precede normalization. One has an odd width, and one no bias."""
    end = ["Normalize"] if is_unit else []
    path = described(types=["Transformer", "Pooling", "Dense", "Dense", *end])
    first = write_layer(path / "2_Dense", (WIDTH, 37), TANH)
    second = write_layer(path / "3_Dense", (37, 10), IDENTITY, has_bias=False)
    engine = engine_of(path)
    assert "pooling: mean, dense to 37, dense to 10; " in engine.facts.notes[0]
    with torch.inference_mode():
        expected = second(first(torch.from_numpy(means(path))).tanh()).numpy()
    if is_unit:
        expected = np.stack(list(map(unit, expected)))
    together, ten, wrong = perform(
        engine, embed(*TEXTS), embed("who", dimensions=10), embed("who", dimensions=WIDTH)
    )
    np.testing.assert_allclose(vectors(together)[0], expected, atol=1e-5)
    np.testing.assert_allclose(vectors(ten)[0][0], expected[2], atol=1e-5)
    assert "vectors have 10 dimensions" in str(wrong)


@pytest.mark.parametrize("name", ["ReLU", "GELU", "SiLU", "Sigmoid"])
def test_activations(described, name):
    path = described(types=["Transformer", "Pooling", "Dense"])
    layer = write_layer(path / "2_Dense", (WIDTH, 8), f"torch.nn.modules.activation.{name}")
    with torch.inference_mode():
        expected = getattr(nn, name)()(layer(torch.from_numpy(means(path)))).numpy()
    got, _ = vectors(perform(engine_of(path), embed(*TEXTS))[0])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_random_weights_need_no_files(described):
    path = described(types=["Transformer", "Pooling", "Dense"])
    write_layer(path / "2_Dense", (WIDTH, 8), TANH, is_saved=False)
    got, _ = vectors(perform(engine_of(path, load_format="dummy"), embed("who", "the cat"))[0])
    assert got.shape == (2, 8)
    assert not np.allclose(got[0], got[1])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"use_residual": True}, "does not support use_residual"),
        ({"activation": "my.module.Swish"}, "does not support activation_function=my.module.Swish"),
        ({"module_input_name": "token_embeddings"}, "module_input_name=token_embeddings"),
        ({"module_output_name": "other"}, "module_output_name=other"),
        ({"in_features": 8}, "takes 8 numbers, but the pooled vectors have 16"),
        ({"out_features": 9}, "but config.json implies .*(9, 16).*download the model again"),
        ({"out_features": "nine"}, "config.json: Expected `int`"),
        ({"is_saved": False}, "save the model again with a current sentence-transformers"),
        (
            {"bias": False},
            r"linear.bias.*, but config.json implies {.linear.weight.: \(8, 16\)}; download",
        ),
    ],
)
def test_layers_that_cannot_be_served_are_refused(described, layer, message):
    path = described(types=["Transformer", "Pooling", "Dense"])
    write_layer(path / "2_Dense", (WIDTH, 8), **{"activation": TANH} | layer)
    with pytest.raises(ConfigurationError, match=message):
        engine_of(path)


def test_another_order_of_modules_is_refused(described):
    path = described(types=["Transformer", "Pooling", "Normalize", "Dense"])
    with pytest.raises(ConfigurationError, match=r"names the order .*Normalize, Dense, which"):
        engine_of(path)
