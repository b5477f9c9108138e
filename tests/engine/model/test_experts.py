"""Grouped experts compute the same as one expert after another, for any routing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from engine.model.mixtures.experts import Experts, SeparateExperts, choose_grouped
from engine.model.quantization.at_load import QUANTIZERS, quantize_weight
from engine.model.quantization.experts import (
    DequantizingExperts,
    TritonExperts,
    quantized_experts,
)
from engine.model.quantization.weights import Float4Weight, Float8Weight, PermutedWeight
from tests.engine.model.conftest import logits

MIXTURES = ["mixtral", "qwen3_moe", "granitemoe"]


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_grouped_products_equal_those_of_single_experts(tiny_model, load, architecture, num_tokens):
    decoder = load(tiny_model(architecture))
    experts = decoder.layers[0].mlp
    assert isinstance(experts, Experts)
    rows = torch.randn(num_tokens, decoder.spec.hidden_size)
    expected = torch.zeros_like(rows)
    scores, chosen = experts.route(rows)
    for token in range(num_tokens):
        for score, expert in zip(scores[token], chosen[token], strict=True):
            gate, up = product(experts.gate_up, expert, rows[token]).chunk(2)
            expected[token] += score * product(experts.down, expert, F.silu(gate) * up)
    torch.testing.assert_close(experts(rows), expected)


def product(weights, expert, row):
    """Multiply a row by the weight of one expert. On a CPU with panels, each has a format."""
    if isinstance(weights, SeparateExperts):
        return weights.formats[expert].multiply(row[None], None)[0]
    return weights[expert] @ row


def test_no_shape_depends_on_the_routing(tiny_model, load, monkeypatch):
    """Shapes that depended on the routing would make the host wait for the device.

    Meta tensors have no data, so whatever waited for their values would raise an error.
    """
    monkeypatch.setattr("engine.model.mixtures.experts.uses_panels", lambda *_: False)
    experts = load(tiny_model("mixtral")).layers[0].mlp
    for name, value in vars(experts).items():
        if isinstance(value, torch.Tensor):
            dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
            setattr(experts, name, value.to("meta", dtype))
    experts.route = lambda rows: (
        torch.empty(len(rows), 2, device="meta", dtype=torch.bfloat16),
        torch.empty(len(rows), 2, dtype=torch.int64, device="meta"),
    )
    experts.activate = lambda gate_up: gate_up.chunk(2, -1)[0]
    rows = torch.empty(5, 32, device="meta", dtype=torch.bfloat16)
    assert experts(rows).shape == (5, 32)


@pytest.mark.parametrize(
    ("capability", "dtype", "module"),
    [
        ((8, 0), torch.bfloat16, "kernels.linear.grouped_linear"),
        ((8, 9), torch.bfloat16, "kernels.linear.grouped_linear"),
        ((9, 0), torch.float16, "kernels.linear.grouped_linear"),
        ((9, 0), torch.float32, "kernels.linear.grouped_linear"),
        ((9, 0), torch.bfloat16, "engine.model.mixtures.experts"),
        ((10, 3), torch.bfloat16, "engine.model.mixtures.experts"),
        ((12, 0), torch.bfloat16, "kernels.linear.grouped_linear"),
    ],
)
def test_our_kernel_is_used_where_torch_would_synchronize(capability, dtype, module, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    assert choose_grouped(torch.device("cuda"), dtype).__module__ == module
    pinned = choose_grouped(torch.device("cuda"), dtype, is_pinned=True)
    assert isinstance(pinned, partial)
    assert pinned.keywords == {"is_pinned": True}
    assert choose_grouped(torch.device("cpu"), dtype).__module__ == "engine.model.mixtures.experts"


def test_tokens_of_a_step_do_not_affect_each_other(tiny_model, load):
    decoder = load(tiny_model("gpt_oss"))
    experts, rows = decoder.layers[0].mlp, torch.randn(6, 32)
    together = experts(rows)
    for index in range(6):
        assert torch.equal(experts(rows[index : index + 1])[0], together[index])
    assert logits(decoder).isfinite().all()


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("precision", QUANTIZERS)
def test_quantized_experts_have_a_kernel_on_cuda(precision):
    weights = [quantize_weight(torch.randn(3 * 16, 128), precision, CPU)]
    for dtype in (torch.bfloat16, torch.float16):
        chosen = quantized_experts(weights, 3, CUDA, dtype)
        assert isinstance(chosen, TritonExperts)
        codes = 3 * 16 * 128 // (2 if precision == "int4" else 1)
        assert chosen.num_bytes == codes + 3 * 16 * (4 if precision == "fp8" else 5)
    for device, dtype in ((CUDA, torch.float32), (CPU, torch.bfloat16)):
        assert isinstance(quantized_experts(weights, 3, device, dtype), DequantizingExperts)


def test_mxfp4_takes_as_many_bytes_as_in_the_checkpoint():
    codes, exponents = (torch.zeros(3 * 16, n, dtype=torch.uint8) for n in (64, 4))
    chosen = quantized_experts([Float4Weight(codes, exponents)], 3, CUDA, torch.bfloat16)
    assert isinstance(chosen, TritonExperts)
    assert chosen.num_bytes == 3 * 16 * (64 + 4)


@pytest.mark.parametrize(
    "weights",
    [
        [quantize_weight(torch.ones(6, 48), "int4", CPU)],  # groups of 16
        [quantize_weight(torch.ones(6, 50), "int8", CPU)],
        [Float8Weight(torch.ones(6, 160).to(torch.float8_e4m3fn), torch.ones(6, 2), 128)],
        [Float4Weight(torch.zeros(6, 16).byte(), torch.zeros(6, 1).byte())],  # a single block
        [quantize_weight(torch.ones(3, 128), precision, CPU) for precision in ("int4", "int8")],
        [PermutedWeight(quantize_weight(torch.ones(6, 128), "int4", CPU), torch.arange(128))],
    ],
    ids=["small groups", "odd widths", "short group", "one block", "two kinds", "act-order"],
)
def test_quantized_experts_without_a_kernel_are_dequantized(weights):
    chosen = quantized_experts(weights, 3, CUDA, torch.bfloat16)
    assert isinstance(chosen, DequantizingExperts)
    whole = torch.cat([weight.dequantized() for weight in weights]).bfloat16()
    assert torch.equal(chosen.dense(), whole.view(3, 2, -1))
