"""Greedy fp32 tokens equal those of transformers' `generate`, however the steps are divided."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from engine import LLM
from engine.attention.backends import CpuBackend
from engine.loading import image_encoder
from engine.vision.families import VISION_FAMILIES
from kernels.cpu.shared_library import unavailable_reason
from strategies.speculation.speculation import Speculation
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.ranks.engines import ranked_engine
from tests.engine.vision.conversations import CONVERSATIONS, SMALL, answers, prompts

PAGED_BLOCKS = {"gemma3": 24}
"""Blocks with which `paged` has to preempt, although it frees those that left a window."""


@pytest.mark.matrix(cases=5)
@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_tokens_equal_transformers(vision_model, expected, model_type, batching):
    """Prompts run in chunks of 10 tokens, beside texts without images, and `paged` preempts."""
    path = vision_model(model_type)
    llm = LLM(
        path,
        batching=batching,
        num_kv_blocks=PAGED_BLOCKS.get(model_type, 44) if batching == "paged" else 400,
        **SMALL,
        **STRATEGIES[batching],
    )
    assert llm.facts.takes_images
    assert answers(llm, prompts(path)) == expected(model_type)
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("model_type", ["mistral3", "qwen3_vl"])
@pytest.mark.parametrize(("mode", "step"), [("swap", 7), ("recompute", 9)])
def test_preempted_images_in_odd_chunks(vision_model, expected, model_type, mode, step):
    path = vision_model(model_type)
    options = SMALL | {"max_rolling_batch_prefill_tokens": step, "preemption_mode": mode}
    llm = LLM(path, batching="paged", num_kv_blocks=30, **options)
    assert answers(llm, prompts(path)) == expected(model_type)
    strategy = llm.llm_engine.strategy
    assert strategy.num_preemptions > 0
    assert (strategy.num_swaps > 0) is (mode == "swap")


@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_the_images_matter(expected, model_type):
    given = expected(model_type)
    assert given[0] != given[4]
    assert len({tuple(answer) for answer in given}) == len(CONVERSATIONS)


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "qwen3_vl"])
def test_several_ranks(vision_model, expected, monkeypatch, model_type):
    """Rank 0 encodes images, and the others repeat what it does with the embeddings."""
    lock, load = threading.Lock(), image_encoder.load_image_encoder

    def load_alone(*arguments):
        with lock:  # transformers patches its classes meanwhile; these ranks are threads
            return load(*arguments)

    monkeypatch.setattr(image_encoder, "load_image_encoder", load_alone)
    path = vision_model(model_type)
    with ranked_engine(path, 2, num_kv_blocks=44, **SMALL) as (engine, _):
        assert answers(SimpleNamespace(llm_engine=engine), prompts(path)) == expected(model_type)


@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "qwen3_vl"])
def test_the_cpu_kernels_and_overlapping_steps(vision_model, expected, model_type):
    path = vision_model(model_type, is_wide=True)
    llm = LLM(path, num_kv_blocks=44, async_scheduling=True, **SMALL)
    assert answers(llm, prompts(path)) == expected(model_type, is_wide=True)
    assert isinstance(llm.llm_engine.executor.passes.backend, CpuBackend) or unavailable_reason()


def test_answers_about_images_have_drafts(vision_model, expected):
    llm = LLM(
        vision_model(),
        speculative_method="suffix",
        speculation="always",
        num_kv_blocks=120,
        **SMALL,
    )
    for _ in range(2):
        assert answers(llm, prompts(vision_model())) == expected()
    extension = llm.llm_engine.strategy.extension
    assert isinstance(extension, Speculation)
    assert extension.counts.num_accepted > 0


def test_dropped_embeddings_are_computed_again(vision_model, expected, monkeypatch):
    path = vision_model()
    monkeypatch.setattr("engine.vision.encoder.MAX_KEPT_TOKENS", 0)
    llm = LLM(path, batching="continuous", num_kv_blocks=400, **SMALL)
    assert answers(llm, prompts(path)) == expected()
