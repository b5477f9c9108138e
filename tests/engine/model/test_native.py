"""Native layers in one call: supported families, equal logits, and fallbacks."""

from __future__ import annotations

import pytest
import torch

from engine.loading.gate import relative_error
from engine.model.native import NativeLayers
from kernels.cpu.integers import rounds_rows
from kernels.cpu.linear import has_pairs
from kernels.cpu.prepared import NoKernelError, PreparedMLP
from kernels.cpu.shared_library import unavailable_reason
from tests.engine.model.conftest import expected_logits, logits
from tests.engine.model.test_documented_families import documented
from tests.engine.tiny_models import OWN

NATIVE = {name for name, one_call in documented().items() if one_call == "yes"}
"""Families whose layers run in one native call.

The others have LayerNorm, experts, scaled residuals, q/k norms after rotation, or no gate.
"""


@pytest.fixture(autouse=True)
def weights_in_panels(monkeypatch):
    """Store weights in panels whatever is faster here. Skip without the C++ library."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr("kernels.cpu.linear.is_faster", lambda: True)


@pytest.fixture
def mlp_rows(monkeypatch):
    """Return a list to which each layer's MLP adds its number of rows in native calls."""
    numbers, bind = [], PreparedMLP.bind

    def watch(self, hidden, num_tokens, *others, **keywords):
        numbers.append(num_tokens)
        return bind(self, hidden, num_tokens, *others, **keywords)

    monkeypatch.setattr(PreparedMLP, "bind", watch)
    return numbers


@pytest.mark.parametrize("architecture", OWN)
def test_logits_are_equal_and_the_families_are_known(tiny_model, load, mlp_rows, architecture):
    folder = tiny_model(architecture, is_wide=True)
    decoder = load(folder)
    is_native = decoder.native is not None
    assert is_native == (architecture in NATIVE), "the column «one call» of docs/models.md"
    mlp_rows.clear()
    native = logits(decoder)
    assert bool(mlp_rows) == is_native
    decoder.native = None
    mlp_rows.clear()
    torch.testing.assert_close(logits(decoder), native, atol=1e-4, rtol=1e-4)
    assert not mlp_rows
    torch.testing.assert_close(native, expected_logits(folder), atol=1e-3, rtol=1e-3)


def test_native_layers_in_bf16(tiny_model, load, mlp_rows):
    decoder = load(tiny_model("qwen3", is_wide=True), dtype=torch.bfloat16)
    if not has_pairs():
        assert decoder.native is None, "without pairs, each product would convert its rows"
        return
    native = logits(decoder, torch.bfloat16)
    assert mlp_rows
    decoder.native = None
    error = (logits(decoder, torch.bfloat16) - native).abs().max() / native.abs().max()
    assert error < 0.05


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_weights(tiny_model, load, mlp_rows, dtype, precision):
    """One native call for all layers gives the same logits as a call for each operation."""
    folder = tiny_model("llama", is_wide=True)
    decoder = load(folder, precision=precision, dtype=dtype, is_exact=True)
    mlp_rows.clear()
    native = logits(decoder, dtype)
    assert mlp_rows
    decoder.native = None
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert relative_error(logits(decoder, dtype), native) < tolerance


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_rows(tiny_model, load, mlp_rows, dtype, precision):
    """One native call for all layers rounds rows in the same way as a call for each operation."""
    folder = tiny_model("llama", is_wide=True)
    decoder = load(folder, precision=precision, dtype=dtype)
    mlp_rows.clear()
    native = logits(decoder, dtype)
    assert mlp_rows
    decoder.native = None
    assert relative_error(logits(decoder, dtype), native) == 0.0
    exact = logits(load(folder, precision=precision, dtype=dtype, is_exact=True), dtype)
    if rounds_rows():
        assert 0.0 < relative_error(native, exact) < 0.2
    else:
        assert torch.equal(native, exact)


def test_the_last_layer_only_computes_rows_with_logits(tiny_model, load, mlp_rows):
    decoder = load(tiny_model("llama", is_wide=True))
    mlp_rows.clear()
    logits(decoder)  # a prompt in chunks of 19, 20 and 1; only the last has logits
    assert mlp_rows == [19, 19, 0, 20, 20, 0, 1, 1, 1]


def test_steps_with_adapters_run_layer_by_layer(tiny_model, load, mlp_rows):
    decoder = load(tiny_model("llama", is_wide=True))
    ids = torch.tensor([3, 5, 7])

    class Nothing:
        def attend(self, call):
            return call.query

    mlp_rows.clear()
    decoder(ids, torch.arange(3), torch.tensor([2]), Nothing(), has_adapters=True)
    assert not mlp_rows


def test_a_layer_without_kernels_is_rejected(tiny_model, load):
    decoder = load(tiny_model("gpt2", is_wide=True))
    with pytest.raises(NoKernelError, match="subtract the mean"):
        NativeLayers(decoder)
