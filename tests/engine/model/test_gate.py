"""The gate: the comparison of our decoder with transformers', and its fallback."""

from __future__ import annotations

import json
import os

import pytest
import torch

from core.errors import ConfigurationError
from engine import LLM
from engine.loading import own_decoder
from engine.loading.gate import load_reference
from engine.loading.kept_logits import KeptLogits
from engine.model.decoder import Decoder
from engine.model.families import FAMILIES
from engine.model.layer import MLP
from engine.model.one_call import OneCall
from engine.model.published.settings import read_spec
from tests.engine.tiny_models import FOREIGN, OWN

REASON = "paged and eager attention give different logits"


def test_a_decoder_with_different_logits_is_not_used(tiny_model, monkeypatch):
    monkeypatch.setattr(MLP, "__call__", lambda self, hidden: hidden)
    monkeypatch.setattr(OneCall, "__call__", lambda *arguments: None)
    facts = LLM(tiny_model("llama"), dtype="fp32").facts
    assert facts.executor == "packed"
    assert facts.decoder.startswith(f"transformers' code (llama): {REASON}")
    with pytest.raises(ConfigurationError, match=f"option.decoder=own cannot run llama: {REASON}"):
        LLM(tiny_model("llama"), dtype="fp32", decoder="own")


def test_a_decoder_with_nan_logits_is_not_used(tiny_model, monkeypatch):
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda *_: logits(*_) * float("nan"))
    assert f"{REASON} (relative error inf)" in LLM(tiny_model("llama"), dtype="fp32").facts.decoder


@pytest.mark.parametrize("architecture", FOREIGN)
def test_the_reason_names_a_missing_family(tiny_model, architecture):
    facts = LLM(tiny_model(architecture), dtype="fp32").facts
    reason = f"model type {architecture} is not in the family table"
    assert facts.decoder == f"transformers' code ({architecture}): {reason}"


@pytest.mark.parametrize(
    ("architecture", "setting", "reason"),
    [
        ("opt", {"do_layer_norm_before": False}, "norms come after the residual adds"),
        ("stablelm", {"qk_layernorm": True}, "separate weights for each head"),
    ],
)
def test_unsupported_settings_are_rejected(tiny_model, source, architecture, setting, reason):
    config = source(tiny_model(architecture)).config
    read_spec(config, 128)
    for name, value in setting.items():
        setattr(config, name, value)
    with pytest.raises(Exception, match=reason):
        read_spec(config, 128)


@pytest.mark.parametrize("architecture", OWN)
def test_the_trial_has_a_layer_of_every_kind(tiny_model, source, architecture):
    spec = read_spec(source(tiny_model(architecture)).config, 128)
    count = spec.num_trial_layers
    assert set(spec.layers[:count]) == set(spec.layers)
    config = spec.first_layers_config(count)
    assert config.num_hidden_layers == count
    first = read_spec(config, 128)
    assert first.layers == spec.layers[:count]
    assert spec.config.num_hidden_layers == len(spec.layers), "the full configuration is unchanged"


def test_only_the_trial_layers_are_loaded_twice(copied, monkeypatch):
    """The gate tries two of six equal layers."""
    folder = copied("llama")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    loaded = []

    def watch(loader, spec, num_layers, **options):
        loaded.append(num_layers)
        return Decoder(loader, spec, num_layers, **options)

    monkeypatch.setattr(own_decoder, "Decoder", watch)
    LLM(folder, dtype="fp32", load_format="dummy")
    assert loaded == [2, 6]


@pytest.mark.matrix(cases=16)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("architecture", OWN)
def test_random_weights_pass_the_gate(tiny_model, load, architecture, is_tied):
    """The decoder takes as many bytes as with the weights of the file."""
    if is_tied and architecture == "nemotron_h":
        pytest.skip("transformers never ties this head, so the gate refuses such a config")
    folder = tiny_model(architecture, changes={"tie_word_embeddings": is_tied})
    assert load(folder, is_dummy=True).num_bytes == load(folder).num_bytes


def test_fp32_has_a_tight_limit_and_low_precision_a_loose_one(tiny_model, monkeypatch):
    tried = []

    def watch(source):
        tried.append(source.dtype)
        return load_reference(source)

    monkeypatch.setattr(own_decoder, "load_reference", watch)
    monkeypatch.setattr(KeptLogits, "read", lambda self: None)
    assert LLM(tiny_model("llama"), dtype="bf16").facts.decoder == "own (llama)"
    assert tried == [torch.float32], "transformers' layers run once, and exactly"
    for name, limits in (("MAX_RELATIVE_ERROR", {torch.float32: -1.0}), ("MAX_KERNEL_ERROR", -1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(own_decoder, name, limits)
            assert REASON in LLM(tiny_model("llama"), dtype="bf16").facts.decoder


def test_a_later_start_asks_transformers_only_if_something_has_changed(
    copied, tmp_path, monkeypatch
):
    def decoder(**options):
        return LLM(folder, dtype="fp32", **options).facts.decoder

    def watch(source):
        asked.append(source)
        return load_reference(source)

    asked = []
    monkeypatch.setattr("core.process.measured.folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(own_decoder, "load_reference", watch)
    folder = copied("llama")
    assert decoder() == decoder() == "own (llama)"
    assert len(asked) == 1
    os.utime(folder / "model.safetensors", (1, 1))
    assert decoder() == decoder() == "own (llama)"
    assert len(asked) == 2
    for path in (tmp_path / "kept").iterdir():  # of a model that has changed unnoticed
        path.write_bytes(bytes(path.stat().st_size))
    assert decoder() == decoder() == "own (llama)"
    assert len(asked) == 3
    num_files = len([*(tmp_path / "kept").iterdir()])
    assert decoder(quantize="int8") == decoder(load_format="dummy") == "own (llama)"
    assert len([*(tmp_path / "kept").iterdir()]) == num_files, "they depend on our own code"


@pytest.mark.parametrize("architecture", OWN)
def test_settings_of_other_families_are_ignored(tiny_model, source, architecture):
    """transformers ignores such settings, too."""
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


def test_decoder_own_is_an_error_if_it_cannot_be_used(tiny_model):
    for options in ({"executor": "library", "batching": "none"}, {"executor": "auto"}):
        architecture = "t5" if options["executor"] == "auto" else "llama"
        with pytest.raises(ConfigurationError, match=r"option\.decoder=own: "):
            LLM(tiny_model(architecture), decoder="own", dtype="fp32", **options)
