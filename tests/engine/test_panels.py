"""Weights in panels: which layers have them, that nothing else changes, and how they are undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.options import Options
from engine import LLM
from engine.device import choose_panels
from engine.fusion import fuse, unfuse
from engine.packed_model import PROBE_CHUNKS
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


def test_what_stays_as_it_is(tiny_model):
    """A head tied to the embedding, and what is not fp32."""
    model = load(tiny_model("llama"))
    model.lm_head.weight = model.model.embed_tokens.weight
    fuse(model, in_panels=True)
    assert type(model.lm_head) is nn.Linear
    assert len(in_panels(model)) == 12
    model = load(tiny_model("llama"), torch.bfloat16)
    fuse(model, in_panels=True)
    assert not in_panels(model)


def test_the_engine_takes_them_and_answers_the_same(tiny_model, monkeypatch):
    path = tiny_model("llama", is_wide=True)
    answers = []
    for has_panels in (False, True):
        monkeypatch.setattr("engine.build.choose_panels", lambda *_, has=has_panels: has)
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
    llm = LLM(tiny_model("llama", is_wide=True), dtype="fp32", fuse=True)
    assert llm.facts.notes == ("nothing fused: on trial, a wrong tile",)
    assert not in_panels(llm._engine._executor._model._model)
    assert len(tokens(llm)[0]) == 9


def test_where_they_were_measured_to_be_faster(monkeypatch):
    def pretend(name):
        target = Target(name, frozenset(), "")
        monkeypatch.setattr("kernels.cpu.linear.host_target", lambda: target)

    pretend("avx2")
    assert choose_panels(Options(), CPU)
    assert not choose_panels(Options(torch_compile=True), CPU), "it could not look into them"
    assert not choose_panels(Options(), torch.device("cuda"))
    pretend("avx512")
    assert not is_faster()
