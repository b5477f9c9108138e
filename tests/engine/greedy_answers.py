"""Greedy answers to five prompts, from transformers' `generate` and from our `LLM`."""

from __future__ import annotations

import random

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from core.configuration.strategy_table import BATCHING_NAMES
from engine import SamplingParams
from tests.engine.tiny_models import VOCABULARY, decoder_class

OPTIONS = {
    "dynamic": {"batch_size": 3, "max_batch_delay": 0},
    "continuous": {"kv_reservation": "pow2"},
}
STRATEGIES = {name: OPTIONS.get(name, {}) for name in BATCHING_NAMES}
"""Options of each strategy."""
NUM_NEW = 14


def prompts():
    rng = random.Random(3)
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in (3, 19, 1, 30, 8)]


def generate(path, model=None, **changes):
    """Return transformers' own answers, one prompt at a time, without the prompts.

    model: None for that of the path.
    """
    is_t5 = path.name == "t5"
    kind = AutoModelForSeq2SeqLM if is_t5 else decoder_class(AutoConfig.from_pretrained(path))
    if model is None:
        model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt in prompts():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
            **changes,
        )
        answers.append(ids[0, 1 if is_t5 else len(prompt) :].tolist())
    return answers


def tokens(llm, **changes):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **changes)
    return [
        request.outputs[0].token_ids for request in llm.generate(prompts(), params, use_tqdm=False)
    ]
