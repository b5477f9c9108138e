"""Tiny models and what transformers answers with them, made once per session."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.engine.greedy_answers import generate
from tests.engine.sampling import grammar_models
from tests.engine.step import graphs
from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a function (architecture, is_wide=False) → folder of a tiny random model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return partial(save_tiny_model, folder=folder)


@pytest.fixture
def exact_rows(monkeypatch):
    """Keep rows exact in products with integer weights.

    Rounding them to 8 bits, as some CPUs do, could change tokens.
    """
    monkeypatch.setattr("engine.model.quantization.integers.rounds_rows", lambda: False)


@pytest.fixture(scope="session")
def expected(tiny_model):
    """Return a function (architecture, **changes) → the answers of transformers' `generate`."""
    known = {}

    def answers_of(architecture, **changes):
        key = architecture, *changes.items()
        if key not in known:
            known[key] = generate(tiny_model(architecture), **changes)
        return known[key]

    return answers_of


@pytest.fixture(scope="module")
def default_graphs(tiny_model):
    return graphs.of_default_sizes(tiny_model("llama"))


@pytest.fixture(scope="module")
def grammar_model(tmp_path_factory):
    """Return the folder of a model with a byte-level tokenizer."""
    return grammar_models.save(tmp_path_factory.mktemp("grammar"))
