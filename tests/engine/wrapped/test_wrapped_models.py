"""Models that take images answer text with their language model, as transformers' `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from engine import LLM
from tests.engine.greedy_answers import NUM_NEW, STRATEGIES, prompts, tokens
from tests.engine.wrapped.models import WRAPPED, save_wrapped_model


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """Return a function (model_type) → the folder of a tiny model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("wrapped")
    return lambda model_type: save_wrapped_model(model_type, folder)


@pytest.fixture(scope="module")
def expected(wrapped):
    """Return a function (model_type) → the answers of transformers' whole model."""
    known = {}

    def answers_of(model_type):
        if model_type not in known:
            model = AutoModelForImageTextToText.from_pretrained(
                wrapped(model_type), dtype=torch.float32, attn_implementation="eager"
            ).eval()
            known[model_type] = [answer(model, prompt) for prompt in prompts()]
        return known[model_type]

    return answers_of


def answer(model, prompt):
    ids = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.matrix
@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("model_type", WRAPPED)
def test_text_equals_transformers(wrapped, expected, model_type, batching):
    llm = LLM(
        wrapped(model_type), batching=batching, dtype="fp32", block_size=4,
        num_kv_blocks=14 if batching == "paged" else 40, max_rolling_batch_prefill_tokens=10,
        **STRATEGIES[batching],
    )  # fmt: skip
    family, _ = WRAPPED[model_type]
    rest = f"the language model of {model_type}; images are refused"
    assert llm.facts.decoder == f"own ({family}), {rest}"
    assert not llm.facts.takes_images
    answers = tokens(llm, ignore_eos=True)
    assert answers == expected(model_type)
    assert len({token for answer in answers for token in answer}) > 5
