"""Heads with quantized weights, in low precision, with adapters, and on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.ranks.order_types import Forward
from kernels.cpu.shared_library import unavailable_reason
from strategies.speculation.speculation import Speculation
from tests.engine.lora.adapter_files import write_adapter
from tests.engine.ranks.engines import answers as ranked_answers
from tests.engine.ranks.engines import ranked_engine
from tests.engine.speculation.eagle_heads import write_head
from tests.engine.speculation.heads import proposer_of, recorded
from tests.engine.speculation.mtp_models import with_mtp
from tests.engine.speculation.test_same_answers import (
    ALWAYS,
    KINDS,
    SMALL,
    answers,
    counts,
    prompts,
)

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)

METHODS = ("mtp", "eagle3")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "int8": {"quantize": "int8"},
    "int4": {"dtype": "bf16", "quantize": "int4"},
}


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Return a function (method) → path and options."""
    known: dict[str, Any] = {}

    def of(method: str) -> Any:
        if method not in known:
            folder = tmp_path_factory.mktemp(method)
            options = {"speculative_method": method, "num_speculative_tokens": 3, **ALWAYS}
            if method == "mtp":
                path, _ = with_mtp(tiny_model("qwen3_5_text", is_wide=True), folder / "model")
            else:
                changes = {"num_hidden_layers": 7}
                path = tiny_model("qwen3", is_wide=True, changes=changes, name="qwen3-of-settings")
                head, _ = write_head(path, folder / "head", (2, 3, 4))
                options["speculative_draft_model"] = str(head)
            known[method] = path, options
        return known[method]

    return of


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_the_answers_are_the_same_bit_by_bit(models, method, setting):
    path, options = models(method)
    common = {**SMALL, **SETTINGS[setting]}
    llm = LLM(path, num_kv_blocks=40, **options, **common)
    assert answers(llm) == answers(LLM(path, batching="none", num_kv_blocks=90, **common))
    assert 10 < counts(llm).num_accepted < 0.95 * counts(llm).num_draft_tokens


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("method", METHODS)
def test_adapters_have_drafts_of_their_own_states(models, method, tmp_path):
    """The head has no adapter, but what it keeps of a prompt depends on the model's."""
    path, options = models(method)
    adapter = LoRARequest("a", 1, str(write_adapter(path, tmp_path / "adapter")))
    common = {"enable_lora": True, "num_kv_blocks": 90, **SMALL}
    every_other = [adapter if index % 2 else None for index in range(len(KINDS))]
    expected = answers(LLM(path, **common), lora_request=every_other)
    alone, mixed = (LLM(path, **options, **common) for _ in range(2))
    assert answers(mixed, lora_request=every_other) == expected
    assert answers(mixed, lora_request=[None] * len(KINDS)) != expected
    assert 20 < counts(mixed).num_accepted < 0.95 * counts(mixed).num_draft_tokens
    by_tokens = []
    for llm in (alone, mixed):
        found = recorded(proposer_of(llm))
        answers(llm, lora_request=[adapter] * len(KINDS))
        by_tokens.append({(*tokens, number): drafts for tokens, number, drafts in found})
    pairs = [(by_tokens[0][key], drafts) for key, drafts in by_tokens[1].items()
             if key in by_tokens[0]]  # fmt: skip
    assert len(pairs) > 20
    for one, other in pairs:
        assert all(a == b for a, b in zip(one, other, strict=False))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_is_whole_on_rank_0(models, method, overlaps):
    """Only rank 0 runs it, so the other has no orders for it. It drafts as on one rank."""
    path, options = models(method)
    common = {**SMALL, "num_kv_blocks": 60, "async_scheduling": overlaps}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    alone = LLM(path, **options, **common)
    outputs = alone.generate(prompts(), params, use_tqdm=False)
    with ranked_engine(path, 2, **{**options, **common}) as (engine, followers):
        before = engine.num_steps
        followers.orders.clear()
        expected = [output.outputs[0].token_ids for output in outputs]
        assert ranked_answers(engine, prompts(), params) == expected
        forwards = [order for order in followers.orders if isinstance(order, Forward)]
        assert len(forwards) == engine.num_steps - before
        extension = engine.strategy.extension
        assert isinstance(extension, Speculation)
        assert extension.counts == counts(alone)
        assert extension.counts.num_accepted > 10
        assert engine.strategy.memory.num_held_blocks == 0
