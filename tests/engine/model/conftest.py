"""Decoders of tiny models, without an engine around them."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoConfig

from engine.loading.gate import eager_logits, paged_logits
from engine.loading.model_source import ModelSource
from engine.loading.own_decoder import load_own_decoder
from engine.phases import Phases
from tests.engine.tiny_models import decoder_class


@pytest.fixture
def source():
    """Return a function (folder, **changes) → the source of a model."""

    def make(folder, **changes):
        settings = {"dtype": torch.float32, "device": torch.device("cpu")} | changes
        return ModelSource(model_dir=folder, config=AutoConfig.from_pretrained(folder), **settings)

    return make


@pytest.fixture
def load(source):
    """Return a function (folder, max_length=128, **changes) → our decoder."""

    def make(folder, max_length=128, **changes):
        return load_own_decoder(source(folder, **changes), max_length, Phases())

    return make


@pytest.fixture
def copied(tiny_model, tmp_path):
    """Return a function (architecture, **options of tiny_model) → a copy that tests may modify."""

    def make(architecture, **options):
        folder = tiny_model(architecture, **options)
        return shutil.copytree(folder, tmp_path / folder.name)

    return make


def logits(decoder, dtype=torch.float32):
    """Return the logits after the last token of the gate's probe."""
    spec = decoder.spec
    device, states = torch.device("cpu"), decoder.states
    return paged_logits(decoder, spec.vocab_size, decoder.shapes, device, dtype, states=states)


def expected_logits(folder):
    model = (
        decoder_class(AutoConfig.from_pretrained(folder))
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    return eager_logits(model, model.config.vocab_size)
