"""Layers that are prepared: which, that the answers stay, and when they compute the old way."""

from __future__ import annotations

import pytest
import torch

from core.options import Options
from engine import LLM, SamplingParams
from engine.device import choose_prepared
from engine.packed_model import _in_fp32
from kernels.cpu.library import what_is_lacking
from kernels.cpu.linear import has_pairs
from kernels.cpu.prepared import PreparedAttention, PreparedLayers, PreparedMLP, PreparedNorm
from tests.engine.test_fusion import tokens

CPU = torch.device("cpu")
BOTH = {"attention": 3, "gated MLP": 3}
WHOLE = BOTH | {"decoder layer": 3}
PREPARED = {
    "llama": WHOLE | {"RMSNorm": 7},
    "mistral": WHOLE | {"RMSNorm": 7},
    "qwen2": WHOLE | {"RMSNorm": 7},
    "qwen3": WHOLE | {"RMSNorm": 13},
    "gemma2": BOTH | {"RMSNorm": 13},
    "phi3": WHOLE | {"RMSNorm": 7},
    "mixtral": {"attention": 3, "RMSNorm": 7},
    "gpt_oss": {"attention": 3, "RMSNorm": 7},
    "qwen2_moe": BOTH | {"RMSNorm": 7},
    "opt": {},
    "gpt2": {},
}
"""Of tiny models with three layers; phi3 rotates half of each head."""


@pytest.fixture(autouse=True, scope="module")
def _needs_a_compiler():
    reason = what_is_lacking()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def runs(monkeypatch):
    """Which prepared parts ran, in order."""
    ran = []
    for kind in (PreparedAttention, PreparedLayers, PreparedMLP, PreparedNorm):

        def call(self, *arguments, own=kind.__call__):
            ran.append(type(self))
            return own(self, *arguments)

        monkeypatch.setattr(kind, "__call__", call)
    return ran


def load(monkeypatch, path, dtype, is_prepared=True):
    monkeypatch.setattr("engine.build.choose_panels", lambda *_: True)
    monkeypatch.setattr("engine.build.choose_prepared", lambda *_: is_prepared)
    return LLM(path, dtype=dtype, fuse=True, block_size=4)


def answer(llm, prompt, params):
    (told,) = llm.generate(prompt, params, use_tqdm=False)
    return told.outputs[0].token_ids


def model_of(llm):
    return llm._engine._executor._model._model


@pytest.mark.parametrize("architecture", PREPARED)
def test_what_is_prepared_and_that_the_answers_stay(tiny_model, monkeypatch, runs, architecture):
    path = tiny_model(architecture, is_wide=True)
    plain = tokens(load(monkeypatch, path, "fp32", is_prepared=False))
    assert not runs
    llm = load(monkeypatch, path, "fp32")
    (note,) = llm.facts.notes
    expected = [f"{number} x prepared {what}" for what, number in PREPARED[architecture].items()]
    assert sorted(part for part in note.split(", ") if "prepared" in part) == sorted(expected)
    assert "left as they are" not in note
    runs.clear()
    assert tokens(llm) == plain
    assert bool(runs) == bool(expected)


def test_the_last_layer_finishes_the_rows_that_have_logits(tiny_model, monkeypatch):
    path = tiny_model("llama", is_wide=True)
    plain, llm = (load(monkeypatch, path, "fp32", is_prepared=each) for each in (False, True))
    rows, own = [], PreparedMLP.bind

    def bind(self, hidden, num_tokens, *others, **keywords):
        rows.append(num_tokens)
        return own(self, hidden, num_tokens, *others, **keywords)

    monkeypatch.setattr(PreparedMLP, "bind", bind)
    prompt = {"prompt_token_ids": list(range(3, 12))}
    ask = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert answer(llm, prompt, ask) == answer(plain, prompt, ask)
    assert rows == [9, 9, 1, 1, 1, 1]
    rows.clear()
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (told,), (expected,) = (each.generate(prompt, ask, use_tqdm=False) for each in (llm, plain))
    assert rows == [9, 9, 9], "each scores the one after it"
    for got, wanted in zip(told.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert {id: each.logprob for id, each in got.items()} == pytest.approx(
            {id: each.logprob for id, each in wanted.items()}, abs=1e-4
        )


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_in_bf16_the_answers_stay(tiny_model, monkeypatch, architecture):
    path = tiny_model(architecture, is_wide=True)
    answers = [tokens(load(monkeypatch, path, "bf16", is_prepared=each)) for each in (False, True)]
    assert answers[0] == answers[1]


def test_a_call_with_anything_else_goes_the_old_way(tiny_model, monkeypatch, runs):
    llm = load(monkeypatch, tiny_model("llama", is_wide=True), "fp32")
    layer = model_of(llm).model.layers[0]
    rows = torch.randn(2, 5, 32)
    runs.clear()
    both = layer.mlp(rows)
    norms = layer.input_layernorm(rows)
    assert not runs, "of two sequences at once"
    for row in range(2):
        torch.testing.assert_close(layer.mlp(rows[row : row + 1])[0], both[row])
        torch.testing.assert_close(layer.input_layernorm(rows[row : row + 1])[0], norms[row])
    assert runs == [PreparedMLP, PreparedNorm] * 2
    runs.clear()
    angles = model_of(llm).model.rotary_emb(rows, torch.arange(5)[None])
    with pytest.raises(Exception, match="do not pass keywords on to attention"):
        layer(rows[:1], position_embeddings=angles, attention_mask=None)
    assert PreparedLayers not in runs
    assert PreparedAttention not in runs
    runs.clear()
    columns = torch.randn(1, 32, 5).transpose(1, 2)
    torch.testing.assert_close(layer.mlp(columns), layer.mlp(columns.contiguous()))
    assert runs == [PreparedMLP], "rows must be dense"
    with pytest.raises(Exception, match="do not pass keywords on to attention"):
        layer.self_attn(
            hidden_states=rows[:1],
            position_embeddings=angles,
            attention_mask=None,
        )
    assert runs == [PreparedMLP]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_they_follow_weights_that_move(tiny_model, monkeypatch, runs, dtype):
    """As they do when the gate looks at a model in fp32."""
    llm = load(monkeypatch, tiny_model("qwen3", is_wide=True), dtype)
    before = tokens(llm)
    model = model_of(llm)
    with _in_fp32(model):
        assert model.dtype == torch.float32
    moved = [each.data.clone() for each in model.parameters()]
    for parameter, data in zip(model.parameters(), moved, strict=True):
        parameter.data = data
    runs.clear()
    assert tokens(llm) == before
    are_widened = dtype == "bf16" and not has_pairs()  # by each product, so norms alone
    assert (PreparedNorm if are_widened else PreparedLayers) in runs


def test_not_beside_adapters(monkeypatch):
    monkeypatch.setattr("engine.device.choose_panels", lambda *_: True)
    assert choose_prepared(Options(), CPU)
    assert not choose_prepared(Options(enable_lora=True), CPU)
