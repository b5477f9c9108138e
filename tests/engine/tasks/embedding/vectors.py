"""Requests for embeddings, and the vectors that transformers alone computes."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from transformers import AutoModel

from core.protocol.task_bodies import EmbeddingAnswer, EmbeddingBody
from tests.engine.tasks.words import tokenizer

TEXTS = ["the cat", "a dog ran on it", "who", "the cat sat on a mat and the dog ran"]


def embed(*inputs, **options):
    return EmbeddingBody(list(inputs), "input", **options)


def vectors(outcome):
    """Return vectors [texts, size] and the number of tokens of each text."""
    assert not isinstance(outcome, Exception), outcome
    answer = msgspec.msgpack.decode(outcome.body, type=EmbeddingAnswer)
    return np.stack([np.frombuffer(vector, "<f4") for vector in answer.vectors]), answer.num_tokens


def hidden(path, text, get=lambda model: model):
    """Return the hidden states [tokens, size] of one text, from transformers alone."""
    ids = torch.tensor([tokenizer()(text)["input_ids"]])
    with torch.inference_mode():
        model = get(AutoModel.from_pretrained(path, dtype=torch.float32).eval())
        return model(input_ids=ids).last_hidden_state[0].numpy()


def unit(vector):
    return vector / np.linalg.norm(vector)
