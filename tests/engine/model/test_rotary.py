"""Rotary angles equal those of transformers and depend only on the position."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.model.published.settings import read_spec
from engine.model.rotary import Rotary

ORIGINAL = 64
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 16.0]}  # fmt: skip
FORMS = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0,
             "original_max_position_embeddings": ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip


def with_rope(folder, parameters):
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": parameters}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def transformers_logits(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1]


def answers(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def prompts():
    """Return a short prompt, and a prompt with positions beyond the model's original length."""
    rng = random.Random(2)
    return [[rng.randrange(1, 97) for _ in range(length)] for length in (5, 90)]


@pytest.mark.parametrize("form", FORMS)
def test_angles_equal_those_of_transformers(copied, prompts, form):
    folder = with_rope(copied("llama"), FORMS[form])
    llm = LLM(folder, dtype="fp32")
    assert llm.facts.decoder == "own (llama)"
    for prompt in prompts:
        (tokens,) = answers(llm, [prompt])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert tokens == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_longrope_does_not_depend_on_other_sequences(copied, prompts, decoder):
    """transformers chooses the frequencies by the longest sequence; a packed model must not."""
    folder = with_rope(copied("llama"), LONGROPE)
    llm = LLM(folder, dtype="fp32", decoder=decoder)
    alone = [answers(llm, [prompt])[0] for prompt in prompts]
    if decoder == "own":
        assert llm.facts.executor == "packed"
        assert answers(llm, prompts) == alone
    else:
        assert "(longrope) depends on the longest" in llm.facts.executor_reason
    short = LLM(folder, dtype="fp32", decoder=decoder, max_model_len=ORIGINAL)
    assert short.facts.executor == "packed"
    if decoder == "own":
        assert answers(short, prompts[:1])[0] != alone[0], "the short factors give another answer"


@pytest.mark.parametrize("is_long", [False, True])
def test_longrope_uses_the_factors_for_max_model_len(copied, source, is_long):
    folder = with_rope(copied("llama"), LONGROPE)
    config = source(folder).config
    spec = read_spec(config, ORIGINAL + is_long)
    rotary = Rotary(spec, torch.device("cpu"), torch.float32)
    cos, sin = rotary(torch.tensor([0, 3])).by_rope[""]
    factors = torch.tensor(LONGROPE["long_factor" if is_long else "short_factor"])
    turns = 3 / (factors * 10000.0 ** (torch.arange(4) / 4))
    scale = rotary(torch.tensor([0])).by_rope[""].cos[0, 0]
    torch.testing.assert_close(cos[1], turns.cos() * scale)
    torch.testing.assert_close(sin[1], turns.sin() * scale)
    assert rotary.width("") == 8


def test_layer_types_have_their_own_angles(tiny_model, source):
    """Gemma 3 has other frequencies in its sliding-window layers."""
    spec = read_spec(source(tiny_model("gemma3_text")).config, 128)
    angles = Rotary(spec, torch.device("cpu"), torch.float32)(torch.arange(5)).by_rope
    assert {layer.rope for layer in spec.layers} == {"full_attention", "sliding_attention"}
    assert not torch.equal(angles["full_attention"].cos, angles["sliding_attention"].cos)
