"""The forward under torch.compile: one graph for every step, and the same tokens.

The compiler's front half alone runs here (`aot_eager`): it finds what cannot be traced and what
would be compiled again. What follows is torch's own.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from core.sampling import SamplingParams
from engine import LLM
from engine.packed_model import PackedModel
from tests.engine.test_equality import expected, prompts, tokens  # noqa: F401

SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}


@pytest.fixture(autouse=True)
def _front_half(monkeypatch):
    # pytest listens to every logger, and torch then describes each step of tracing to it.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    counters.clear()
    compile_with = PackedModel.compile
    monkeypatch.setattr(PackedModel, "compile", lambda self: compile_with(self, "aot_eager"))


def test_tokens_equal_generate_from_one_graph(tiny_model, expected):  # noqa: F811
    """Prompts in chunks, decodes, one token alone, steps that sample nothing; windows and sinks."""
    llm = LLM(tiny_model("gpt_oss"), torch_compile=True, **SMALL)
    assert tokens(llm) == expected("gpt_oss")
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not any("torch_compile" in note for note in llm.facts.notes)


def test_two_compiled_models_keep_to_their_own_memory(tiny_model, expected):  # noqa: F811
    path = tiny_model("llama")
    first, second = (LLM(path, torch_compile=True, **SMALL) for _ in range(2))
    params = SamplingParams(temperature=0, max_tokens=3)
    second.generate([[9, 8, 7]], params, use_tqdm=False)
    assert tokens(first) == tokens(second) == expected("llama")


def test_what_cannot_be_compiled_runs_as_it_is(tiny_model, monkeypatch):
    def fail(self):
        raise RuntimeError("no C++ compiler\nand a long trace")

    monkeypatch.setattr(PackedModel, "compile", fail)
    llm = LLM(tiny_model("llama"), torch_compile=True, **SMALL)
    note = "option.torch_compile: the model runs uncompiled: no C++ compiler"
    assert note in llm.facts.notes
    assert len(llm.generate(prompts(), use_tqdm=False)) == len(prompts())
