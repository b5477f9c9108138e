"""Models with random weights need no weight file, and answer as transformers does."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

from core.configuration.options import make_options
from core.errors import ConfigurationError
from engine import LLM, SamplingParams
from engine.build import build_engine
from engine.loading.model_source import ModelSource
from engine.loading.random_weights import load_random_reference
from tests.engine.tiny_models import MODELS, UNTIED

PROMPTS = [[3, 5, 7], [11, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SPREAD = {"initializer_range": 0.3}
"""A wider range of weights than usual, so that a model does not repeat one token forever."""


@pytest.fixture
def folder(tmp_path):
    """Return a function architecture → folder with only a config.json."""

    def make(architecture):
        settings = MODELS[architecture] | UNTIED | SPREAD
        path = tmp_path / architecture
        CONFIG_MAPPING[architecture](**settings).save_pretrained(path)
        assert [file.name for file in path.iterdir()] == ["config.json"]
        return path

    return make


def source(path, **changes):
    config = AutoConfig.from_pretrained(path)
    settings = {"dtype": torch.float32, "device": torch.device("cpu"), "is_dummy": True} | changes
    return ModelSource(model_dir=path, config=config, **settings)


def generate(path, executor="library"):
    """Return transformers' own answers with the same weights."""
    is_t5 = path.name == "t5"
    if executor == "packed":
        model = load_random_reference(source(path))
    else:
        model = source(path).load(AutoModelForSeq2SeqLM if is_t5 else AutoModelForCausalLM).eval()
    answers = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            min_new_tokens=GREEDY.max_tokens,
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        answers.append(ids[0, 1 if is_t5 else len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(
    ("architecture", "executor"),
    [("llama", "packed"), ("llama", "library"), ("qwen2_moe", "packed"), ("bloom", "library"),
     ("t5", "library")],
)  # fmt: skip
def test_answers_equal_those_of_generate(folder, architecture, executor):
    path = folder(architecture)
    llm = LLM(path, load_format="dummy", executor=executor, dtype="fp32")
    assert llm.facts.executor == executor
    answers = [
        request.outputs[0].token_ids for request in llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    ]
    assert answers == generate(path, executor)
    assert len({token for answer in answers for token in answer}) > 2


def test_a_model_that_cannot_run_packed_falls_back_unharmed(folder):
    """Changes to the configuration by the first attempt must not affect the second."""
    path = folder("gpt_neo")
    llm = LLM(path, load_format="dummy", dtype="fp32")
    assert "it has custom attention classes" in llm.facts.executor_reason
    assert [
        request.outputs[0].token_ids for request in llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    ] == generate(path)


def test_builds_are_reproducible_and_leave_torchs_generator_unchanged(folder):
    path = folder("llama")

    def build():
        return source(path, dtype=torch.bfloat16).load(AutoModelForCausalLM).state_dict()

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, first, two, second = build(), torch.rand(1), build(), torch.rand(1)
    assert torch.equal(torch.cat([first, second]), expected)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, two[name])
    assert one["lm_head.weight"].float().std() == pytest.approx(0.3, rel=0.1)


def test_a_model_with_code_of_its_own(folder):
    """The model's own classes are not needed, because our decoder knows the model type."""
    path = folder("llama")
    (path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM): pass\n"
    )
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (path / "config.json").write_text(json.dumps(config))
    facts = LLM(path, load_format="dummy", dtype="fp32", trust_remote_code=True).facts
    assert facts.decoder == "own (llama)"


def test_existing_weight_files_are_not_read(tiny_model, tmp_path):
    path = tmp_path / "llama"
    path.mkdir()
    (path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    (path / "model.safetensors").write_text("no weights at all")
    facts = LLM(path, load_format="dummy").facts
    assert facts.executor == "packed"
    with pytest.raises(ConfigurationError, match="cannot read"):
        LLM(path)


def test_facts_note_the_random_weights(folder, tiny_model):
    def facts(path, load_format):
        return build_engine(path, make_options({"load_format": load_format})).facts

    assert any("weights are random" in note for note in facts(folder("llama"), "dummy").notes)
    assert not any("random" in note for note in facts(tiny_model("llama"), "auto").notes)


def test_other_files_of_the_folder_are_used(folder):
    path = folder("t5")
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 6], "decoder_start_token_id": 9, "pad_token_id": 0})
    )
    llm = LLM(path, load_format="dummy", dtype="fp32")
    assert llm.facts.eos_token_ids == (5, 6)
    assert llm.llm_engine.executor.model.generation_config.decoder_start_token_id == 9
