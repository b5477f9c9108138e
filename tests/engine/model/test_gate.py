"""The gate: what it compares, and what happens where a decoder computes something else."""

from __future__ import annotations

import json

import pytest
import torch

from core.errors import ConfigurationError
from engine import LLM
from engine.loading import own
from engine.model.decoder import MLP, Decoder
from engine.model.families import FAMILIES
from engine.model.spec import read_spec
from tests.engine.tiny_models import FOREIGN, OWN

REASON = "paged and eager attention give different logits"


def test_a_decoder_that_computes_something_else_is_not_served(tiny_model, monkeypatch):
    monkeypatch.setattr(MLP, "__call__", lambda self, hidden: hidden)
    monkeypatch.setattr(own, "NativeLayers", lambda decoder: None)
    facts = LLM(tiny_model("llama"), dtype="fp32").facts
    assert facts.executor == "packed"
    assert facts.decoder.startswith(f"transformers' code (llama): {REASON}")
    with pytest.raises(ConfigurationError, match=f"option.decoder=own: llama has none: {REASON}"):
        LLM(tiny_model("llama"), dtype="fp32", decoder="own")


def test_a_decoder_that_gives_no_numbers_is_not_served(tiny_model, monkeypatch):
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda *_: logits(*_) * float("nan"))
    assert f"{REASON} (relative error inf)" in LLM(tiny_model("llama"), dtype="fp32").facts.decoder


@pytest.mark.parametrize("architecture", FOREIGN)
def test_the_reason_is_said_where_there_is_no_row(tiny_model, architecture):
    facts = LLM(tiny_model(architecture), dtype="fp32").facts
    reason = f"there is no row for {architecture} in the table"
    assert facts.decoder == f"transformers' code ({architecture}): {reason}"


@pytest.mark.parametrize(
    ("architecture", "setting", "reason"),
    [
        ("opt", {"do_layer_norm_before": False}, "norms come after the residuals"),
        ("stablelm", {"qk_layernorm": True}, "normalizes each head by weights of its own"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
    ],
)
def test_rare_members_of_a_family_are_refused(tiny_model, source, architecture, setting, reason):
    config = source(tiny_model(architecture)).config
    read_spec(config, 128)
    for name, value in setting.items():
        setattr(config, name, value)
    with pytest.raises(Exception, match=reason):
        read_spec(config, 128)


@pytest.mark.parametrize("architecture", OWN)
def test_the_trial_has_a_layer_of_every_kind(tiny_model, source, architecture):
    spec = read_spec(source(tiny_model(architecture)).config, 128)
    count = spec.sample_layers
    assert set(spec.layers[:count]) == set(spec.layers)
    config = spec.config_of_first(count)
    assert config.num_hidden_layers == count
    first = read_spec(config, 128)
    assert first.layers == spec.layers[:count]
    assert spec.config.num_hidden_layers == len(spec.layers), "which others still read"


def test_no_more_layers_than_that_are_loaded_twice(copied, monkeypatch):
    """Of six alike, two."""
    folder = copied("llama")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    loaded, make = [], own._decoder

    def watch(checkpoint, source, spec, num_layers, **options):
        loaded.append(num_layers)
        return make(checkpoint, source, spec, num_layers, **options)

    monkeypatch.setattr(own, "_decoder", watch)
    LLM(folder, dtype="fp32", load_format="dummy")
    assert loaded == [2, 6]


@pytest.mark.parametrize("architecture", OWN)
def test_random_weights_are_named_as_files_name_them(tiny_model, load, architecture):
    """And kept once: each goes when it is taken."""
    folder = tiny_model(architecture)
    assert load(folder, is_dummy=True).num_bytes == load(folder).num_bytes


def test_fp32_decides_and_low_precision_looks_for_wrong_kernels(tiny_model, monkeypatch):
    tried, trial = [], own._trial

    def watch(source, *others):
        tried.append(source.dtype)
        return trial(source, *others)

    monkeypatch.setattr(own, "_trial", watch)
    assert LLM(tiny_model("llama"), dtype="bf16").facts.decoder == "own (llama)"
    assert tried == [torch.float32, torch.bfloat16]
    for name, limits in (("MAX_RELATIVE_ERROR", {torch.float32: -1.0}), ("MAX_KERNEL_ERROR", -1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(own, name, limits)
            assert REASON in LLM(tiny_model("llama"), dtype="bf16").facts.decoder


@pytest.mark.parametrize("architecture", OWN)
def test_a_config_with_settings_of_other_families_changes_nothing(tiny_model, source, architecture):
    """transformers ignores them."""
    config = source(tiny_model(architecture)).config
    layers = read_spec(config, 128).layers
    foreign = {"use_sliding_window": False}
    if FAMILIES[architecture].windows == "none":
        foreign["sliding_window"] = 64
    if FAMILIES[architecture].windows == "all":
        foreign["layer_types"] = ["full_attention"] * len(layers)
    for name, value in foreign.items():
        setattr(config, name, value)
    assert read_spec(config, 128).layers == layers


def test_own_is_never_ignored(tiny_model):
    for options in ({"executor": "library", "batching": "none"}, {"executor": "auto"}):
        architecture = "t5" if options["executor"] == "auto" else "llama"
        with pytest.raises(ConfigurationError, match=r"option\.decoder=own: "):
            LLM(tiny_model(architecture), decoder="own", dtype="fp32", **options)
