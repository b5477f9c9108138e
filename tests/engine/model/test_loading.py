"""Weight files: shards, tied weights, older names and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from container.capacity.decoder import decoder_from_directory
from core.configuration.options import Options
from core.errors import ConfigurationError
from engine import LLM
from tests.engine.greedy_answers import generate, tokens
from tests.engine.model.conftest import expected_logits, logits

FILE = "model.safetensors"


def edited(folder, edit):
    """Rewrite the tensors of a file after `edit` has changed them in place."""
    with safe_open(folder / FILE, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE, metadata)
    return folder


def test_shards_are_found_by_the_index(copied, load):
    folder = copied("llama")
    expected, model = logits(load(folder)), AutoModelForCausalLM.from_pretrained(folder)
    (folder / FILE).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert torch.equal(logits(load(folder)), expected)
    shards[1].unlink()
    with pytest.raises(ConfigurationError, match=f"cannot read .*{shards[1].name}"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.3.eh_proj.weight", "model.mtp_linear_proj.weight"])
def test_layers_that_predict_later_tokens_are_not_loaded(copied, load, name):
    folder = copied("glm4_moe")
    expected = logits(load(folder))
    edited(folder, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    assert torch.equal(logits(load(folder)), expected)
    edited(folder, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.ones(2)}))
    with pytest.raises(ConfigurationError, match="belongs to no layer"):
        load(folder)


def test_kimi_k2_is_a_deepseek_v3(copied):
    folder = copied("deepseek_v3")
    expected = generate(folder, eos_token_id=None)
    config = json.loads((folder / "config.json").read_text())
    changes = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.X"}}
    (folder / "config.json").write_text(json.dumps(config | changes))
    llm = LLM(folder, dtype="fp32")
    assert llm.facts.decoder == "own (deepseek_v3)"
    assert tokens(llm, ignore_eos=True) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_multiplies_by_the_embedding(copied, load, dtype):
    """The file first has a second copy of the embedding, and then none."""
    folder = copied("llama")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))

    def tie(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edited(folder, tie)
    both = load(folder)
    torch.testing.assert_close(logits(both), expected_logits(folder))
    edited(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert torch.equal(logits(load(folder)), logits(both))


def test_a_tied_weight_may_have_only_the_heads_name(copied, load):
    folder = copied("llama")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    edited(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    torch.testing.assert_close(logits(load(folder)), expected_logits(folder))


def test_a_missing_bias_is_an_error(copied, load):
    """Without the error, our bias would be 0 and that of transformers random."""
    name = "model.layers.0.self_attn.k_proj.bias"
    folder = edited(copied("qwen2"), lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigurationError, match=f"has no tensor '{name}'"):
        load(folder)


def test_the_published_form_of_gpt2(copied, load):
    """The published file has names without the prefix, and attention masks among the weights."""
    folder = copied("gpt2")
    expected = logits(load(folder))

    def publish(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)

    assert torch.equal(logits(load(edited(folder, publish))), expected)


def test_other_file_formats_are_loaded_by_transformers(copied, tmp_path):
    folder = copied("llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / FILE).unlink()
    with pytest.raises(ConfigurationError, match=r"pickle files.*option.allow_pickle_weights=true"):
        LLM(folder, dtype="fp32")
    decoder = LLM(folder, dtype="fp32", allow_pickle_weights=True).facts.decoder
    assert decoder.startswith("transformers' code (llama): it has neither model.safetensors nor")


def test_code_in_a_pickle_file_never_runs(copied, tmp_path):
    """Even if pickle files are allowed, only tensors are unpickled."""
    folder, trace = copied("llama"), tmp_path / "ran"

    class Code:
        def __reduce__(self):
            return Path.touch, (trace,)

    torch.save({"model.norm.weight": Code()}, folder / "pytorch_model.bin")
    (folder / FILE).unlink()
    with pytest.raises(ConfigurationError, match="pickle files"):
        LLM(folder, dtype="fp32")
    with pytest.raises(ConfigurationError, match="Weights only load failed"):
        LLM(folder, dtype="fp32", allow_pickle_weights=True)
    assert not trace.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trace.exists(), "with weights_only=False, the file runs its code"


@pytest.mark.parametrize(
    ("architecture", "edit", "message"),
    [
        (
            "llama",
            lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"),
            "has no tensor 'model.layers.2.mlp.up_proj.weight'",
        ),
        (
            "llama",
            lambda tensors: tensors.update({"model.layers.1.mlp.extra.weight": torch.ones(2)}),
            "model.safetensors: tensor 'model.layers.1.mlp.extra.weight' belongs to no layer",
        ),
        (
            "llama",
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
            r"model.safetensors: tensor 'model.norm.weight' has shape \[31\], but config.json "
            r"implies \[32\]",
        ),
        (
            "llama",
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(32).to(torch.int8)}),
            "tensor 'model.norm.weight' is torch.int8, not a float",
        ),
        (
            "mixtral",
            lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.3.w2.weight"),
            "has no tensor 'model.layers.0.mlp.experts.3.w2.weight'",
        ),
    ],
    ids=["missing", "left over", "misshapen", "of integers", "of an expert"],
)
def test_an_invalid_tensor_is_an_error(copied, architecture, edit, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(edited(copied(architecture), edit), dtype="fp32")


def test_missing_weights_are_an_error_in_transformers_code_too(copied):
    folder = edited(copied("llama"), lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ConfigurationError, match=r"has no tensor 'model\.norm\.weight'"):
        LLM(folder, dtype="fp32", decoder="transformers")


def test_a_truncated_file_is_an_error(copied):
    folder = copied("llama")
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigurationError, match=r"cannot read .*model\.safetensors: .*incomplete"):
        LLM(folder, dtype="fp32")
    (folder / FILE).unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    (folder / "other.safetensors").write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"cannot read .*index\.json"):
        LLM(folder, dtype="fp32")


def test_no_weight_is_a_view_of_the_file(tiny_model, load):
    """If a weight were a view, replacing the file would change the model or crash the process."""
    decoder = load(tiny_model("gpt2"))
    before = logits(decoder)
    path = tiny_model("gpt2") / FILE
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(len(data) - 4096))
    try:
        assert torch.equal(logits(decoder), before)
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gpt_oss", "ernie4_5"])
def test_num_bytes_counts_the_stored_weights(tiny_model, load, architecture):
    """Each weight of the file counts once, in fp32, as these weights are not exact in bf16."""
    folder = tiny_model(architecture)
    with safe_open(folder / FILE, "pt") as file:
        total = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    padding = load(folder).num_bytes - total
    assert 0 <= padding < 0.5 * total, "only partial panels are padded"


def test_loading_shows_a_progress_bar(tiny_model, load, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load(tiny_model("llama"))
    assert "loading layers: 100%" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.parametrize(
    "architecture", ["deepseek_v3", "gemma4_text", "qwen2_moe", "cohere2_moe", "youtu", "gpt_oss"]
)
def test_the_plan_knows_the_layers_that_adapters_change(tiny_model, load, architecture):
    folder = tiny_model(architecture)
    parts = [(linear, part) for linear in load(folder).linears for part in linear.parts.values()]
    width = sum(linear.in_features + part.rows.stop - part.rows.start for linear, part in parts)
    assert decoder_from_directory(folder, Options()).linear_width == width
