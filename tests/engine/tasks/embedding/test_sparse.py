"""Sparse vectors (SPLADE) equal those of transformers' masked-LM head."""

from __future__ import annotations

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from core.errors import ConfigurationError
from core.protocol.task_bodies import EmbeddingAnswer
from tests.engine.tasks.conftest import engine_of, perform
from tests.engine.tasks.embedding.vectors import TEXTS, embed
from tests.engine.tasks.words import WORDS, tokenizer


def sparse(outcome):
    """Return vectors [texts, vocabulary]; places without a number are 0."""
    answer = msgspec.msgpack.decode(outcome.body, type=EmbeddingAnswer)
    rows = np.zeros((len(answer.vectors), len(WORDS)), "<f4")
    for row, places, vector in zip(rows, answer.places or [], answer.vectors, strict=True):
        row[np.frombuffer(places, "<i4")] = np.frombuffer(vector, "<f4")
        assert len(vector) == 4 * (row != 0).sum()
    return rows


def test_sparse_vectors(task_model, tmp_path):
    path = shutil.copytree(task_model("filler"), tmp_path / "splade")
    modules = [{"type": "x.MLMTransformer"}, {"type": "x.SpladePooling", "path": "1"}]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1").mkdir()
    model = AutoModelForMaskedLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [model(**tokenizer()(text, return_tensors="pt")).logits[0] for text in TEXTS]
    expected = np.stack([each.relu().log1p().amax(0).numpy() for each in logits])
    assert 0.05 < (expected == 0).mean() < 0.9
    asked = embed(*TEXTS, is_sparse=True), embed("who", is_sparse=None), embed("who")
    engine = engine_of(path, max_rolling_batch_prefill_tokens=20)
    assert engine.facts.notes[0].startswith("pooling: splade; vectors are not normalized")
    together, alone, refused = perform(engine, *asked)
    np.testing.assert_allclose(sparse(together), expected, atol=1e-5)
    np.testing.assert_allclose(sparse(alone), expected[2:3], atol=1e-5)
    assert (refused.field, "ask /embed_sparse" in str(refused)) == ("model", True)
    by_option = engine_of(task_model("filler"), task="embed", pooling="splade", normalize=True)
    lengths = np.linalg.norm(sparse(perform(by_option, asked[0])[0]), axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    (path / "1" / "config.json").write_text('{"pooling_strategy": "sum"}')
    with pytest.raises(ConfigurationError, match="are sum and relu; supported are max and relu"):
        engine_of(path)


def test_dense_models_have_no_sparse_vectors(task_model):
    (refused,) = perform(engine_of(task_model("encoder")), embed("who", is_sparse=True))
    assert (refused.field, "ask /embed for them" in str(refused)) == ("model", True)
    with pytest.raises(ConfigurationError, match="was not trained for text-embedding"):
        engine_of(task_model("encoder"), pooling="splade")
