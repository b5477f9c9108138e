"""Weights in panels: which layers have them, that nothing else changes, and how they are undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.options import Options
from engine import LLM
from engine.device import choose_panels
from engine.fusion import fuse, unfuse
from engine.packed_model import PROBE_CHUNKS, _in_fp32
from engine.panels import PanelLinear
from kernels.cpu.library import Target, what_is_lacking
from kernels.cpu.linear import is_faster, to_panels
from tests.engine.test_fusion import load, logits, tokens

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _needs_a_compiler():
    reason = what_is_lacking()
    if reason is not None:
        pytest.skip(reason)


def in_panels(model):
    return {name for name, each in model.named_modules() if isinstance(each, PanelLinear)}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "mixtral", "gpt2"])
def test_every_linear_layer_has_its_weight_in_panels(tiny_model, architecture):
    model = load(tiny_model(architecture))
    expected = logits(model)
    fusion = fuse(model, in_panels=True)
    assert not fusion.left
    assert fusion.replaced["product in panels"] == len(in_panels(model)) > 0
    assert not [each for each in model.modules() if type(each) is nn.Linear]
    torch.testing.assert_close(logits(model), expected)
    with fusion.undone():
        torch.testing.assert_close(logits(model), expected)
    torch.testing.assert_close(logits(model), expected)


def test_no_weight_is_held_twice(tiny_model):
    model = load(tiny_model("llama"))
    num_bytes, vocab_size = model.get_memory_footprint(), model.config.vocab_size
    fuse(model, in_panels=True)
    padding = len(to_panels(torch.ones(vocab_size, 1)).flatten()) - vocab_size
    assert model.get_memory_footprint() == num_bytes + 4 * padding * model.config.hidden_size


def test_all_of_it_is_undone(tiny_model):
    model = load(tiny_model("llama"))
    expected = logits(model)
    unfuse(model, fuse(model, in_panels=True))
    assert not in_panels(model)
    assert not any("forward" in vars(each) for each in model.modules())
    torch.testing.assert_close(logits(model), expected)


def test_weights_that_bf16_holds_are_bf16_in_panels(tiny_model):
    """The fp32 logits stay the same, and so does all that a look at the layers shows."""
    model = load(tiny_model("qwen2")).bfloat16().float()
    expected, num_bytes = logits(model), model.get_memory_footprint()
    num_linear = sum(each.weight.nbytes for each in model.modules() if type(each) is nn.Linear)
    fusion = fuse(model, in_panels=True)
    assert fusion.replaced["product in panels of bf16"] == len(in_panels(model)) > 0
    assert not fusion.left
    torch.testing.assert_close(logits(model), expected)
    with fusion.undone():
        torch.testing.assert_close(logits(model), expected)
    assert model.get_memory_footprint() < num_bytes - 0.4 * num_linear
    unfuse(model, fusion)
    assert not in_panels(model)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    torch.testing.assert_close(logits(model), expected)


def test_a_head_that_is_tied_to_the_embedding_leaves_it_its_weight(tiny_model):
    model = load(tiny_model("llama")).bfloat16().float()
    model.lm_head.weight = model.model.embed_tokens.weight
    expected = logits(model)
    fusion = fuse(model, in_panels=True)
    assert fusion.replaced["product in panels of bf16"] == len(in_panels(model)) + 1 == 13
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.panels.dtype == torch.bfloat16
    torch.testing.assert_close(logits(model), expected)
    unfuse(model, fusion)
    assert not hasattr(model.lm_head, "panels")
    torch.testing.assert_close(logits(model), expected)


def test_a_tied_head_stays_as_it_is_where_its_weight_would_be_held_twice_over(tiny_model):
    model = load(tiny_model("llama"))
    model.lm_head.weight = model.model.embed_tokens.weight
    fuse(model, in_panels=True)
    assert not hasattr(model.lm_head, "panels")
    assert len(in_panels(model)) == 12


def test_models_in_bf16_have_panels_too(tiny_model):
    model = load(tiny_model("llama"), torch.bfloat16)
    expected = logits(model)
    fusion = fuse(model, in_panels=True)
    assert fusion.replaced["product in panels"] == len(in_panels(model)) == 13
    got = logits(model)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


def test_models_in_fp16_stay_as_they_are(tiny_model):
    model = load(tiny_model("llama"), torch.float16)
    fuse(model, in_panels=True)
    assert not in_panels(model)


def test_the_engine_takes_them_and_answers_the_same(tiny_model, monkeypatch):
    path = tiny_model("llama", is_wide=True)
    answers = []
    for has_panels in (False, True):
        monkeypatch.setattr("engine.build.choose_panels", lambda *_, has=has_panels: has)
        monkeypatch.setattr("engine.build.choose_prepared", lambda *_: False)
        llm = LLM(path, dtype="fp32", fuse=True)
        assert ("product in panels" in llm.facts.notes[0]) is has_panels
        answers.append(tokens(llm))
    assert answers[0] == answers[1]


def test_the_gate_takes_out_what_fails(tiny_model, monkeypatch):
    from engine import panels

    def fail_on_19_rows(rows, *arguments, **keywords):
        if rows.shape[-2] == PROBE_CHUNKS[0][1]:
            raise ValueError("a wrong tile")
        return own(rows, *arguments, **keywords)

    own = panels.linear
    monkeypatch.setattr("engine.panels.linear", fail_on_19_rows)
    monkeypatch.setattr("engine.build.choose_panels", lambda *_: True)
    monkeypatch.setattr("engine.build.choose_prepared", lambda *_: False)
    llm = LLM(tiny_model("llama", is_wide=True), dtype="fp32", fuse=True)
    assert llm.facts.notes == ("nothing fused: on trial, a wrong tile",)
    assert not in_panels(llm._engine._executor._model._model)
    assert len(tokens(llm)[0]) == 9


def test_where_they_were_measured_to_be_faster(monkeypatch):
    def pretend(name):
        target = Target(name, frozenset(), ())
        monkeypatch.setattr("kernels.cpu.linear.host_target", lambda: target)

    pretend("avx2")
    assert choose_panels(Options(), CPU)
    assert not choose_panels(Options(torch_compile=True), CPU), "it could not look into them"
    assert not choose_panels(Options(), torch.device("cuda"))
    pretend("neon")
    assert not is_faster()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_follow_a_model_that_is_fp32_for_a_while(tiny_model, dtype):
    """As the gate makes it, where low precision alone would explain what differs."""
    model = load(tiny_model("qwen2")).bfloat16().to(dtype)
    expected = logits(model)
    fusion = fuse(model, in_panels=True)
    assert in_panels(model)
    with _in_fp32(model):
        fused = logits(model)
        with fusion.undone():
            torch.testing.assert_close(fused, logits(model))
        assert fused.dtype == torch.float32
    assert logits(model).dtype == dtype
    torch.testing.assert_close(logits(model), expected, atol=0.05, rtol=0.05)
