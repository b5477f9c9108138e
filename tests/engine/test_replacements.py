"""What looks as if it could be replaced, and is left because it computes something else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from transformers.models.cohere import modeling_cohere
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine.fusion import fuse


class Layer(nn.Module):
    """A module with one child, which is what a decoder is to `fuse`."""

    def __init__(self, child, dtype=torch.float32):
        super().__init__()
        self.child = child.to(dtype)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if "norm" in type(child).__name__.lower():
                    weight.uniform_(0.5, 1.5)
                elif name.endswith("weight"):
                    weight.normal_(0, 2 / weight.shape[-1] ** 0.5)


class CentredRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class BiasedRMSNorm(LlamaRMSNorm):
    def __init__(self, width):
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return super().forward(x) + self.bias


class OtherEpsRMSNorm(LlamaRMSNorm):
    """`eps` says one thing, `forward` another."""

    def forward(self, x):
        x = x.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (x * scale).to(self.weight.dtype)


class ScaledRMSNorm(LlamaRMSNorm):
    """So little that bf16 alone would not show it."""

    def forward(self, x):
        return super().forward(x) * 1.005


class ManyRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return [super().forward(x)]


class WideRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [CentredRMSNorm, BiasedRMSNorm, OtherEpsRMSNorm, ScaledRMSNorm, ManyRMSNorm, WideRMSNorm],
)
def test_norms_that_compute_something_else_are_left(kind, dtype):
    layer = Layer(kind(64), dtype)
    fusion = fuse(layer)
    assert (fusion.replaced, fusion.left) == (Counter(), Counter({"RMSNorm": 1}))
    assert "forward" not in vars(layer.child)
    assert str(fusion) == "fused: nothing; left as they are: 1 x RMSNorm"


class Sizes:
    hidden_size, intermediate_size, mlp_bias = 32, 48, False

    def __init__(self, hidden_act):
        self.hidden_act = hidden_act


class ClampedMLP(LlamaMLP):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x)).clamp(max=10)
        return self.down_proj(gate * self.up_proj(x))


class SwappedMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        (LlamaMLP, "relu"),
        (LlamaMLP, "gelu"),  # exact: in bf16 the one by tanh would pass for it
        (LlamaMLP, "quick_gelu"),
        (ClampedMLP, "silu"),
        (SwappedMLP, "silu"),
    ],
)
def test_mlps_that_compute_something_else_are_only_merged(kind, activation):
    layer, x = Layer(kind(Sizes(activation)), torch.bfloat16), torch.randn(1, 5, 32).bfloat16()
    expected = layer.child(x)
    fusion = fuse(layer)
    assert fusion.replaced == Counter({"gate_proj/up_proj": 1})
    assert fusion.left == Counter({"gated MLP": 1})
    assert torch.equal(layer.child(x), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu_new"])
def test_both_activations_are_told_apart(activation):
    layer = Layer(LlamaMLP(Sizes(activation)), torch.float32)
    x = torch.randn(1, 5, 32)
    expected = layer.child(x)
    assert fuse(layer).replaced["gated MLP"] == 1
    torch.testing.assert_close(layer.child(x), expected)


def test_a_rotary_of_another_kind_is_left():
    """Cohere's pairs are neighbours, not halves."""
    config = modeling_cohere.CohereConfig(hidden_size=32, num_attention_heads=2)
    layer = Layer(modeling_cohere.CohereAttention(config, 0))
    fusion = fuse(layer)
    assert fusion.left == Counter({"rotary": 1})
    assert "forward" not in vars(layer.child)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    half = q.shape[-1] // 2
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turn = [torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k)]
    return q * cos + turn[0] * sin, k * cos + turn[1] * sin


class Attention(nn.Module):
    """Calls it in ways that the kernel does not take, and has a closure and defaults."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, q, k, cos, sin, *, keywords=None):
        assert __class__ is Attention
        return apply_rotary_pos_emb(q, k, cos, sin, **(keywords or {}))


def rotary_call(batch=1, dtype=torch.float32, expanded=False):
    q, k = torch.randn(batch, 3, 5, 8), torch.randn(batch, 1 if expanded else 2, 5, 8)
    cos, sin = torch.randn(2, batch, 5, 8)
    return q, k.expand(batch, 2, 5, 8), cos.to(dtype), sin.to(dtype)


@pytest.mark.parametrize(
    ("call", "keywords", "is_fused"),
    [
        (rotary_call(), {}, True),
        (rotary_call(batch=2), {}, False),
        (rotary_call(dtype=torch.bfloat16), {}, False),
        (rotary_call(expanded=True), {}, False),
        (rotary_call(), {"unsqueeze_dim": 1}, False),
        (tuple(x.transpose(1, 2) for x in rotary_call()[:2]) + rotary_call()[2:],
         {"unsqueeze_dim": 2}, False),
        (tuple(x.mT.contiguous().mT for x in rotary_call()[:2]) + rotary_call()[2:], {}, False),
    ],
)  # fmt: skip
def test_the_kernel_gets_only_calls_that_it_computes(calls, call, keywords, is_fused):
    layer = Layer(Attention())
    keywords = {"keywords": keywords} if keywords else {}  # a default of the keyword-only kind
    expected = layer.child(*call, **keywords)
    assert fuse(layer).replaced == Counter({"rotary": 1})
    calls.clear()
    got = layer.child(*(x if x.stride(1) == 0 else x.clone() for x in call), **keywords)
    torch.testing.assert_close(got, expected)
    assert calls["rotary"] == is_fused


class Decorated(Attention):
    @torch.no_grad()
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


def test_what_cannot_be_rebound_is_not_considered():
    layer = Layer(Decorated())
    fusion = fuse(layer)
    assert not fusion.replaced
    assert "forward" not in vars(layer.child)
    hooked = Layer(Attention())
    hooked.child.forward = own = lambda *arguments: None
    assert not fuse(hooked).replaced
    assert hooked.child.forward is own
