"""Tiny models that take images, and what transformers answers with them, made once per session."""

from __future__ import annotations

import pytest
import torch

from tests.engine.vision.conversations import CONVERSATIONS, generate
from tests.engine.vision.models import save_vision_model


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory):
    """Return a function (model_type, is_wide=False) → folder of a model that takes images."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("vision")
    return lambda model_type="idefics3", **settings: save_vision_model(
        folder, model_type, **settings
    )


@pytest.fixture(scope="session")
def expected(vision_model):
    """Return a function (model_type, is_wide=False) → the answers of `generate`."""
    known = {}

    def answers_of(model_type="idefics3", **settings):
        path = vision_model(model_type, **settings)
        if path not in known:
            known[path] = [generate(path, text, seeds) for text, seeds in CONVERSATIONS.items()]
        return known[path]

    return answers_of
