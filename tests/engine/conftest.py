"""Tiny models, built once a session, and what watches them."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import partial

import pytest
import torch

from engine.elementwise import Elementwise, make_elementwise
from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """(architecture, is_wide=False) → folder of a tiny random model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return partial(save_tiny_model, folder=folder)


@pytest.fixture
def calls(monkeypatch):
    """How often each elementwise function ran, as the models see them."""
    counts, own = Counter(), make_elementwise(torch.device("cpu"))

    def watched(name, function):
        def call(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        return call

    watching = Elementwise(
        **{each.name: watched(each.name, getattr(own, each.name)) for each in fields(own)}
    )
    monkeypatch.setattr("engine.fusion.make_elementwise", lambda device: watching)
    return counts
