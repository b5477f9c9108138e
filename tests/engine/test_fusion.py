"""What is replaced in a model, that nobody else sees it, and the gate that may undo it."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from core.options import Options
from engine import LLM, SamplingParams
from engine.device import choose_fusion
from engine.elementwise import Elementwise, make_elementwise
from engine.fusion import fuse
from engine.packed_model import MAX_RELATIVE_ERROR, PROBE_CHUNKS

CPU = torch.device("cpu")
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


def test_a_fused_layer_can_be_traced_whole(tiny_model):
    model = load(tiny_model("llama"))
    fuse(model)
    layer, rows = model.model.layers[0], torch.randn(1, 5, 32)
    angles = model.model.rotary_emb(rows, torch.arange(5)[None])
    traced = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.inference_mode():
        expected = layer(rows, position_embeddings=angles)
        for _ in range(2):
            torch.testing.assert_close(traced(rows, position_embeddings=angles), expected)


def tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    answers = llm.generate([[5, 9, 41], [7] * 20], params, use_tqdm=False)
    return [each.outputs[0].token_ids for each in answers]


def test_the_gate_undoes_what_would_change_the_answer(tiny_model, monkeypatch):
    """Were a wrong replacement to pass its own trial."""
    path, own = tiny_model("llama", is_wide=True), make_elementwise(CPU)
    plain = LLM(path, dtype="fp32", fuse=False)
    monkeypatch.setattr("engine.proposal._error", lambda *_: 0.0)
    wrong = replace(own, gated_activation=lambda rows, _: own.gated_activation(rows, "gelu_tanh"))
    monkeypatch.setattr("engine.fusion.make_elementwise", lambda _: wrong)
    monkeypatch.setattr("engine.build.choose_prepared", lambda *_: False)
    llm = LLM(path, dtype="fp32", fuse=True)
    (note,) = llm.facts.notes
    assert note.startswith("nothing fused: on trial, paged and eager attention give different")
    assert llm.facts.executor == "packed"
    assert tokens(llm) == tokens(plain)


def test_the_gate_undoes_what_fails(tiny_model, monkeypatch):
    """On something that the trial did not have: here, the length of the probe's first chunk."""
    own = make_elementwise(CPU)

    def fail_on_19_rows(rows, *arguments, **options):
        if len(rows) == PROBE_CHUNKS[0][1]:
            raise ValueError("rows must be contiguous")
        return own.rms_norm(rows, *arguments, **options)

    failing = replace(own, rms_norm=fail_on_19_rows)
    monkeypatch.setattr("engine.fusion.make_elementwise", lambda _: failing)
    monkeypatch.setattr("engine.build.choose_prepared", lambda *_: False)
    llm = LLM(tiny_model("llama", is_wide=True), dtype="fp32", fuse=True)
    assert llm.facts.notes == ("nothing fused: on trial, rows must be contiguous",)
    assert len(tokens(llm)[0]) == 9


def test_in_low_precision_fp32_decides_for_the_fused_model_too(tiny_model, monkeypatch):
    monkeypatch.setitem(MAX_RELATIVE_ERROR, torch.bfloat16, -1.0)
    llm = LLM(tiny_model("llama"), dtype="bf16", fuse=True)
    assert llm.facts.notes[0].startswith("fused: ")
    model = llm._engine._executor._model._model
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_fused_where_there_are_kernels_for_it(tiny_model, monkeypatch):
    assert choose_fusion(Options(), torch.device("cuda"))
    assert choose_fusion(Options(), CPU)
    assert not choose_fusion(Options(torch_compile=True), CPU), "it fuses by itself"
    assert not choose_fusion(Options(fuse=False), torch.device("cuda"))
    monkeypatch.setattr("engine.device.what_is_lacking", lambda: "there is no compiler")
    assert not choose_fusion(Options(), CPU)
    assert choose_fusion(Options(fuse=True), CPU)
    assert LLM(tiny_model("llama", is_wide=True)).facts.notes == ()
    (note,) = LLM(tiny_model("gpt2", is_wide=True), fuse=True).facts.notes
    assert note in ("fused: nothing", "fused: 1 x product in panels")
