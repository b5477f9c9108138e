"""Prompts with images: what they share with others, and where steps may divide them."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine import LLM, SamplingParams
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.vision.conversations import GREEDY, NUM_NEW, SMALL, answers, prompts, read


@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "mistral3", "qwen3_vl"])
def test_prefixes_are_shared_only_between_equal_images(vision_model, model_type):
    """A block of the prefix cache ends after three of the four tokens of Gemma 3's image."""
    path = vision_model(model_type)
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    text = "u:<image> and a question;a:"
    one, other = read(path, text, (2,)), read(path, text, (3,))
    assert one.token_ids == other.token_ids
    [first] = answers(llm, [one])
    strategy = llm.llm_engine.strategy
    [second] = answers(llm, [other])
    # Where windows are freed, only a prompt's third request finds what the second one parted from.
    has_windows = model_type == "gemma3"
    before_image = one.images[0].start // 4 * 4
    assert strategy.num_prefix_hits == (0 if has_windows else before_image)
    for _ in range(2):
        assert answers(llm, [one, other]) == [first, second]
    assert first != second
    block = 8 if has_windows else 4
    assert strategy.num_prefix_hits >= (2 if has_windows else 4) * (len(one.token_ids) - block)


def test_samples_of_a_prompt_share_its_images(vision_model, expected):
    path = vision_model()
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    params = msgspec.structs.replace(GREEDY, n=2)
    [both] = answers(llm, prompts(path)[:1], params)
    assert sorted(both) == sorted(2 * expected()[0])


def test_embeddings_are_kept_for_each_salt(vision_model):
    path = vision_model()
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    encoder, image = llm.llm_engine.executor.passes.model.encoder, prompts(path)[0].images[0]
    assert encoder(image, "one tenant") is encoder(image, "one tenant")
    assert encoder(image, "another") is not encoder(image, "one tenant")
    assert torch.equal(encoder(image, "another"), encoder(image, "one tenant"))


@pytest.mark.parametrize("batching", STRATEGIES)
def test_a_prompt_that_ends_with_an_image(vision_model, batching):
    """The prompt's last token does not run alone in a step, because it belongs to the image."""
    path = vision_model("gemma3")
    prompt = prompts(path)[2]
    ends = msgspec.structs.replace(prompt, token_ids=prompt.token_ids[: prompt.images[0].end])
    llm = LLM(path, batching=batching, num_kv_blocks=400, **SMALL, **STRATEGIES[batching])
    [one] = answers(llm, [ends])
    assert len(one) == NUM_NEW
    [both] = answers(llm, [ends], msgspec.structs.replace(GREEDY, n=2))
    assert sorted(both) == sorted(2 * one)
    beams = SamplingParams(num_beams=2, max_tokens=4, ignore_eos=True, temperature=0)
    assert len(answers(llm, [ends], beams)[0]) == 4


@pytest.mark.parametrize("max_rows", [3, 5])
def test_scores_of_a_prompt_do_not_divide_an_image(vision_model, expected, monkeypatch, max_rows):
    path = vision_model("gemma3")
    monkeypatch.setattr("engine.scores.column.MAX_SCORED_ROWS", max_rows)
    llm = LLM(path, num_kv_blocks=400, **SMALL)
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=1)
    assert answers(llm, prompts(path), params) == expected("gemma3")
