"""What is replaced in a model, that it computes the same, and what is left alone."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import fields

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.cohere import modeling_cohere
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine import LLM, SamplingParams
from engine.elementwise import Elementwise, make_elementwise
from engine.fusion import fuse
from engine.packed_model import MAX_RELATIVE_ERROR
from kernels import torch_elementwise

ATTENTION = {"q_proj/k_proj/v_proj": 3, "rotary": 3}
MLP = {"gate_proj/up_proj": 3, "gated MLP": 3}
REPLACED = {
    "llama": ATTENTION | MLP | {"RMSNorm": 7},
    "mistral": ATTENTION | MLP | {"RMSNorm": 7},
    "qwen2": ATTENTION | MLP | {"RMSNorm": 7},
    "qwen3": ATTENTION | MLP | {"RMSNorm": 13},
    "gemma2": ATTENTION | MLP | {"RMSNorm": 13},
    "phi3": {"rotary": 3, "gated MLP": 3, "RMSNorm": 7},
    "mixtral": ATTENTION | {"RMSNorm": 7},
    "gpt_oss": ATTENTION | {"RMSNorm": 7},
    "qwen2_moe": ATTENTION | MLP | {"RMSNorm": 7},  # the MLP of the shared expert
    "opt": {"q_proj/k_proj/v_proj": 3},
    "gpt2": {},
}
"""Of tiny models with three layers."""


def load(path, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # not all 1, so that it matters where a product is rounded
                weight += torch.linspace(-0.5, 0.5, weight.numel()).to(dtype)
    return model.eval()


@torch.inference_mode()
def logits(model):
    ids = (torch.arange(23) * 7 % 90 + 1)[None]
    return model(input_ids=ids, use_cache=False).logits


@pytest.fixture
def calls(monkeypatch):
    """How often each elementwise function ran, as the models see them."""
    counts = Counter()

    def make(device):
        def counted(name, function):
            def call(*arguments, **options):
                counts[name] += 1
                return function(*arguments, **options)

            return call

        own = make_elementwise(device)
        return Elementwise(
            **{each.name: counted(each.name, getattr(own, each.name)) for each in fields(own)}
        )

    monkeypatch.setattr("engine.fusion.make_elementwise", make)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", REPLACED)
def test_what_is_replaced_runs_and_changes_nothing(tiny_model, calls, architecture, dtype):
    model = load(tiny_model(architecture), dtype)
    expected, num_bytes = logits(model), model.get_memory_footprint()
    fusion = fuse(model)
    replaced = REPLACED[architecture]
    assert fusion.replaced == Counter(replaced)
    assert not fusion.left
    assert model.get_memory_footprint() == num_bytes
    calls.clear()
    torch.testing.assert_close(logits(model), expected)
    names = {"rms_norm": "RMSNorm", "gated_activation": "gated MLP", "rotary": "rotary"}
    assert calls == Counter({name: replaced.get(what, 0) for name, what in names.items()})
    calls.clear()
    with fusion.undone():
        torch.testing.assert_close(logits(model), expected)
    assert not calls
    logits(model)
    assert calls or not replaced or architecture == "opt"
    fusion.undo()
    assert not any("forward" in vars(each) for each in model.modules())


def test_weights_are_freed_as_they_are_merged(tiny_model, monkeypatch):
    model = load(tiny_model("llama"))
    own = [weakref.ref(each.weight) for each in model.modules() if isinstance(each, nn.Linear)]
    alive = []

    def count(device):
        return Elementwise(
            *[lambda *_, **__: alive.append(sum(ref() is not None for ref in own))] * 3
        )

    monkeypatch.setattr("engine.fusion.make_elementwise", count)
    fuse(model)
    assert sum(ref() is not None for ref in own) == 3 * 2 + 1, "o_proj, down_proj and the head"
    assert len(set(alive)) >= 4, "layer by layer"


def test_nobody_else_sees_it(tiny_model):
    """Not the library, and not another model of the same classes."""
    model, other = load(tiny_model("llama")), load(tiny_model("llama"))
    library = sys.modules[type(model).__module__]
    classes = [each for each in vars(library).values() if isinstance(each, type)]
    before = [dict(vars(each)) for each in (library, *classes)]
    fuse(model)
    assert [dict(vars(each)) for each in (library, *classes)] == before
    assert not any("forward" in vars(each) for each in other.modules())
    assert type(other.model.layers[0].mlp.up_proj) is nn.Linear


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
    """1.4 times two percent off."""

    def forward(self, x):
        return super().forward(x) * 1.02


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


def rotary_call(batch=1, width=8, dtype=torch.float32, expanded=False):
    q, k = torch.randn(batch, 3, 5, 8), torch.randn(batch, 1 if expanded else 2, 5, 8)
    cos, sin = torch.randn(2, batch, 5, width)
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


def test_the_fused_model_can_be_traced_whole(tiny_model):
    model = load(tiny_model("llama"))
    model.model.layers = model.model.layers[:1]
    expected = logits(model)
    fuse(model)
    traced = torch.compile(model.model.layers[0], fullgraph=True, backend="eager")
    embedded = torch.randn(1, 5, 32)
    angles = model.model.rotary_emb(embedded, torch.arange(5)[None])
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(
                traced(embedded, position_embeddings=angles),
                model.model.layers[0](embedded, position_embeddings=angles),
            )
    torch.testing.assert_close(logits(model), expected)


def tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    answers = llm.generate([[5, 9, 41], [7] * 20], params, use_tqdm=False)
    return [each.outputs[0].token_ids for each in answers]


def test_the_gate_undoes_what_would_change_the_answer(tiny_model, monkeypatch):
    """Were a wrong replacement to pass its own trial."""
    plain = LLM(tiny_model("llama"), dtype="fp32")
    monkeypatch.setattr("engine.proposal._error", lambda *_: 0.0)
    wrong = {"activation": "gelu_tanh"}
    monkeypatch.setattr(
        torch_elementwise,
        "gated_activation",
        lambda gate_up, activation, own=torch_elementwise.gated_activation: own(gate_up, **wrong),
    )
    llm = LLM(tiny_model("llama"), dtype="fp32", fuse=True)
    (note,) = llm.facts.notes
    assert note.startswith("nothing fused: on trial, paged and eager attention give different")
    assert llm.facts.executor == "packed"
    assert tokens(llm) == tokens(plain)


def test_the_gate_undoes_what_fails(tiny_model, monkeypatch):
    norm, count = torch_elementwise.rms_norm, []

    def fail_in_the_end(*arguments, **options):
        count.append(1)
        if len(count) > 6 * 7:  # trials of seven norms
            raise ValueError("rows must be contiguous")
        return norm(*arguments, **options)

    monkeypatch.setattr(torch_elementwise, "rms_norm", fail_in_the_end)
    llm = LLM(tiny_model("llama"), dtype="fp32", fuse=True)
    assert llm.facts.notes == ("nothing fused: on trial, rows must be contiguous",)
    assert len(tokens(llm)[0]) == 9


def test_in_low_precision_fp32_decides_for_the_fused_model_too(tiny_model, monkeypatch):
    monkeypatch.setitem(MAX_RELATIVE_ERROR, torch.bfloat16, -1.0)
    llm = LLM(tiny_model("llama"), dtype="bf16", fuse=True)
    assert llm.facts.notes[0].startswith("fused: ")
    model = llm._engine._executor._model._model
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_on_the_cpu_only_where_asked_for(tiny_model):
    assert LLM(tiny_model("llama")).facts.notes == ()
    assert LLM(tiny_model("llama"), fuse=False).facts.notes == ()
    (note,) = LLM(tiny_model("gpt2"), fuse=True).facts.notes
    assert note == "fused: nothing"
