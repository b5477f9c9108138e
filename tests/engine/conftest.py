"""Tiny models, built once per session."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a function (architecture, is_wide=False) → folder of a tiny random model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return partial(save_tiny_model, folder=folder)


@pytest.fixture
def exact_rows(monkeypatch):
    """Do not round rows for products with integer weights, which would change tokens."""
    monkeypatch.setattr("engine.model.quantization.integers.rounds_rows", lambda: False)
