"""Tiny models that take images, and what transformers answers with them, made once per session."""

from __future__ import annotations

from functools import cache

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

    @cache
    def answers_of(path):
        return [generate(path, text, seeds) for text, seeds in CONVERSATIONS.items()]

    return lambda model_type="idefics3", **settings: answers_of(
        vision_model(model_type, **settings)
    )
