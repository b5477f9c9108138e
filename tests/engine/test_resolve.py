"""What follows from the options, the config and the device, without a model."""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config

from core.configuration.batching import StepLimits
from core.errors import ConfigurationError
from engine.resolve import assume, kv_dtype_name
from tests.engine.resolved import resolved


def test_a_decoder_is_resolved_for_the_packed_executor():
    found = resolved()
    assert (found.executor, found.batching) == ("packed", "paged")
    assert found.limits == StepLimits(max_model_len=128, max_sequences=256, max_step_tokens=512)
    assert found.may_swap
    assert found.lora is None


def test_a_step_has_a_token_for_each_sequence():
    assert resolved(max_rolling_batch_prefill_tokens=3).limits == StepLimits(128, 3, 3)


def test_on_cuda_steps_overlap_and_use_graphs_by_default():
    assert resolved("cuda", kv_cache_memory_bytes=1).overlaps
    assert not resolved("cuda", async_scheduling=False).overlaps
    assert resolved("cuda").graph_prompt_sizes
    assert resolved("cuda", enforce_eager=True).graph_prompt_sizes is None
    assert resolved("cuda", cuda_graph_sizes="0").graph_prompt_sizes == ()
    assert not resolved().overlaps
    assert resolved().graph_prompt_sizes is None
    assert resolved(async_scheduling=True).overlaps


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (lambda: resolved(executor="library", batching="none"), "option.executor=library"),
        (lambda: resolved(not_packed="it is odd"), "llama cannot run packed: it is odd"),
        (
            lambda: resolved(config=T5Config()),
            "t5 cannot run packed: it is an encoder-decoder model",
        ),
    ],
)
def test_other_models_are_resolved_for_the_library(found, reason):
    assert (found().executor, found().executor_reason) == ("library", reason)
    assert kv_dtype_name(found().kv_dtype) == "float32"


def test_generate_computes_whole_prompts_in_one_step():
    found = resolved(executor="library", batching="dynamic", batch_size=3, kv_cache_dtype="fp8")
    assert found.limits.max_step_tokens == assume(found).max_step_tokens == 3 * 128
    assert assume(found).num_blocks == 3 * 128 // 16
    assert found.kv_dtype == torch.float32, "transformers has its own KV cache"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "packed"}, "option.executor=packed: llama cannot run packed: why; set"),
        ({"decoder": "own"}, "option.decoder=own: llama cannot run packed: why; set"),
        ({"enable_lora": True}, "option.enable_lora needs the packed executor, but llama cannot"),
        ({"batching": "paged"}, "paged follows from option.batching=paged, but llama cannot run"),
        ({"task": "text2text-generation"}, "llama is not an encoder-decoder model"),
        ({"adapters": "x"}, "option.adapters needs option.enable_lora=true"),
    ],
)
def test_options_that_the_library_does_not_support_say_why(options, message):
    with pytest.raises(ConfigurationError, match=message):
        resolved(not_packed="why", **options)
