"""Engines on several ranks answer as one rank does, whatever a step consists of."""

from __future__ import annotations

import msgspec
import pytest

from core.configuration.step_size import StepSize
from core.plan import BlockMoves
from core.sampling import Finish
from engine import LLM, SamplingParams
from engine.ranks.order_types import AnyOrder, Change, Forward, Move
from engine.speculation.draft_model import DraftModel
from kernels.cpu.shared_library import unavailable_reason
from strategies.speculation.speculation import Speculation
from tests.engine.greedy_answers import NUM_NEW, generate, prompts
from tests.engine.lora.adapter_files import registry, write_adapter
from tests.engine.ranks.engines import answers, ranked_engine, with_strategy
from tests.engine.sampling.grammar_models import PROMPTS as GRAMMAR_PROMPTS
from tests.engine.sampling.grammar_models import SMALL as GRAMMAR_OPTIONS
from tests.engine.sampling.grammar_models import form

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "olmo2", "cohere2", "glm4",
            "qwen2_moe", "gpt_oss")  # fmt: skip
BATCHINGS = {
    "none": {"num_blocks": 40},
    "dynamic": {"num_blocks": 40},
    "continuous": {"num_blocks": 40, "kv_reservation": "pow2"},
    "paged": {"num_blocks": 14},
}
CHUNKS = {"max_rolling_batch_prefill_tokens": 10}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_strategies(tiny_model, family, size):
    """Prompts run in chunks of 10 tokens beside decodes, and `paged` preempts."""
    path = tiny_model(family)
    expected = generate(path, eos_token_id=None)
    with ranked_engine(path, size, num_kv_blocks=40, **CHUNKS) as (engine, _):
        for batching, settings in BATCHINGS.items():
            other = with_strategy(engine, batching, **settings)
            assert answers(other, prompts(), GREEDY) == expected, batching
            assert (other.strategy.num_preemptions > 0) == (batching == "paged")


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["lfm2", "bamba"])
def test_states_are_split(tiny_model, family):
    """`paged` swaps them. Bamba's two groups are on two ranks."""
    path = tiny_model(family)
    memory = MEMORY["swap"] | {"num_kv_blocks": 12}
    with ranked_engine(path, 2, **memory, **CHUNKS) as (engine, followers):
        assert answers(engine, prompts(), GREEDY) == generate(path, eos_token_id=None)
        moves = [order.moves for order in followers.orders if isinstance(order, Move)]
        assert any(move.state_swap_ins for move in moves)
        samples = SamplingParams(n=2, temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        first, second, *_ = answers(engine, prompts()[:1], samples)
        assert first == second == generate(path, eos_token_id=None)[0]


REQUESTS = {
    "samples": {"n": 3, "seed": 4, "temperature": 0.9},
    "beams": {"num_beams": 3, "n": 2, "temperature": 0.0},
    "penalties": {"temperature": 0.8, "seed": 1, "top_p": 0.9, "repetition_penalty": 1.5},
    "scores": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
}
MEMORY = {
    "swap": {"num_kv_blocks": 14, "preemption_mode": "swap"},
    "recompute": {"num_kv_blocks": 14, "preemption_mode": "recompute"},
    "overlap": {"num_kv_blocks": 40, "async_scheduling": True},
}


@pytest.fixture(scope="module")
def one_rank(tiny_model):
    """Return the answers of one rank to each kind of request."""
    llm = LLM(tiny_model("llama"), dtype="fp32", block_size=4, num_kv_blocks=60, **CHUNKS)
    return {
        name: answers(llm.llm_engine, prompts(), SamplingParams(max_tokens=NUM_NEW, **request))
        for name, request in REQUESTS.items()
    }


@pytest.mark.parametrize("memory", MEMORY)
def test_every_kind_of_request(tiny_model, one_rank, memory):
    path = tiny_model("llama")
    with ranked_engine(path, 2, **MEMORY[memory], **CHUNKS) as (engine, followers):
        followers.orders.clear()  # the start-up has tried all kinds of moves
        for name, request in REQUESTS.items():
            if memory == "overlap" or name != "beams":  # beams need more memory
                params = SamplingParams(max_tokens=NUM_NEW, **request)
                assert answers(engine, prompts(), params) == one_rank[name], name
        moves = [order.moves for order in followers.orders if isinstance(order, Move)]
        assert any(move.copies for move in moves) == (memory == "overlap"), "beams copy on write"
        assert (engine.strategy.num_preemptions > 0) == (memory != "overlap")
        assert any(move.swap_outs for move in moves) == (memory == "swap")
        assert any(move.swap_ins for move in moves) == (memory == "swap")
        assert engine.strategy.memory.num_held_blocks == 0


def test_a_draft_model_is_whole_on_rank_0(tiny_model, one_rank):
    """Only rank 0 runs it, so the other has no orders of its own for it."""
    path = tiny_model("llama")
    options = {"speculative_draft_model": str(path), "speculation": "always", **CHUNKS}
    with ranked_engine(path, 2, num_kv_blocks=60, **options) as (engine, followers):
        speculation = engine.strategy.extension
        assert isinstance(speculation, Speculation)
        assert isinstance(speculation.proposer, DraftModel)
        weights = speculation.proposer.executor.passes.model.weights_bytes
        assert weights > 1.5 * engine.executor.passes.model.weights_bytes
        for name in ("samples", "scores"):
            params = SamplingParams(max_tokens=NUM_NEW, **REQUESTS[name])
            before = engine.num_steps
            followers.orders.clear()
            assert answers(engine, prompts(), params) == one_rank[name], name
            forwards = [order for order in followers.orders if isinstance(order, Forward)]
            assert len(forwards) == engine.num_steps - before
        counts = speculation.counts
        assert counts.num_accepted > 0.9 * counts.num_draft_tokens > 30


@pytest.mark.skipif(unavailable_reason() is not None, reason="products depend on the batch")
@pytest.mark.parametrize("memory", ["swap", "overlap"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_change_no_bit(tiny_model, method, memory):
    """Beside the same ranks without drafts, since sums over ranks round otherwise than one rank."""
    path = tiny_model("llama", is_wide=True)
    runs = [[5, 6, 7], [8, 9], [11, 12, 13, 14], [15]]
    repeated = [run * 4 for run in runs]
    few = {"allowed_token_ids": (4, 6, 9)}  # so that they repeat
    kinds = ({"temperature": 0}, {"temperature": 0.5, "seed": 4, "n": 2, **few})
    found = []
    for drafts in ({}, {"speculative_method": method, "speculation": "always"}):
        options = MEMORY[memory] | CHUNKS | drafts
        with ranked_engine(path, 2, **options) as (engine, _):
            for kind in kinds:
                params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, **kind)
                found.append(values(engine, repeated, params))
            assert engine.strategy.num_preemptions > 0 or memory == "overlap"
    assert found[:2] == found[2:]
    speculation = engine.strategy.extension
    assert isinstance(speculation, Speculation)
    assert 20 < speculation.counts.num_accepted < speculation.counts.num_draft_tokens


def values(engine, prompts, params):
    """Return the tokens of each answer, and their exact log-probabilities."""
    ids = [engine.add(prompt, params, 0.0) for prompt in prompts]
    found = {}
    while engine.has_work():
        for output in engine.step(0.0):
            assert output.finish != Finish.ERROR, output.failure
            rows = zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True)
            found.setdefault((ids.index(output.request_id), output.index), []).extend(rows)
    return [found[key] for key in sorted(found)]


def test_cached_prefixes_are_skipped_on_every_rank(tiny_model):
    options = {"num_kv_blocks": 40, "enable_prefix_caching": True}
    with ranked_engine(tiny_model("llama"), 2, **options) as (engine, followers):
        first = answers(engine, [[*range(1, 20)]], GREEDY)
        followers.orders.clear()
        assert answers(engine, [[*range(1, 20)]], GREEDY) == first
    assert followers.orders[0].num_tokens == 3, "16 of 19 tokens are in whole blocks"


def test_a_grammar(grammar_model):
    """Only rank 0 knows the grammar. The model has one KV head, which both ranks hold."""
    params = SamplingParams(temperature=0, max_tokens=20, **form(regex="[a-f]{4,12}"))
    llm = LLM(grammar_model, **GRAMMAR_OPTIONS)
    expected = answers(llm.llm_engine, GRAMMAR_PROMPTS, params)
    assert expected != answers(llm.llm_engine, GRAMMAR_PROMPTS, GREEDY)
    with ranked_engine(grammar_model, 2, **GRAMMAR_OPTIONS) as (engine, _):
        assert answers(engine, GRAMMAR_PROMPTS, params) == expected


def test_adapters_are_split_and_may_come_later(tiny_model, tmp_path):
    path = tiny_model("llama")
    adapter = write_adapter(path, tmp_path / "adapter")
    options = {"enable_lora": True, "max_loras": 2, "num_kv_blocks": 40, **CHUNKS}
    llm = LLM(path, dtype="fp32", block_size=4, **options)
    registry(llm.llm_engine).load("poet", str(adapter))
    expected = answers(llm.llm_engine, prompts(), GREEDY, "poet")
    plain = answers(llm.llm_engine, prompts(), GREEDY)
    assert expected != plain
    with ranked_engine(path, 2, **options) as (engine, followers):
        assert answers(engine, prompts(), GREEDY) == plain
        registry(engine).load("poet", str(adapter))
        assert isinstance(followers.orders[-1], Change)
        assert answers(engine, prompts(), GREEDY, "poet") == expected
        assert answers(engine, prompts(), GREEDY) == plain


def test_a_step_tells_the_other_ranks_sizes_only(tiny_model):
    """The tokens themselves are in the tensor that follows each order."""
    with ranked_engine(tiny_model("llama"), 2, num_kv_blocks=40) as (engine, followers):
        followers.orders.clear()
        answers(engine, [[1, 2, 3]], GREEDY)
        orders = [order for order in followers.orders if isinstance(order, Forward)]
    assert [order.num_tokens for order in orders] == [3] + [1] * (NUM_NEW - 1)
    assert {order.num_rows for order in orders} == {1}


@pytest.mark.parametrize(
    "order",
    [
        Move(BlockMoves(((1, 2),), (), ((3, 4),))),
        Forward(20, 2, 5, 5, 4, 2, 4, (), StepSize(4, 1, 16), None),
        Forward(3, 1, 1, 1, 1, 2, 0, ("adapters",), None, ((0, 3, 3),)),
    ],
)
def test_orders_arrive_as_they_were_sent(order):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=AnyOrder) == order


def test_the_rank_with_the_least_room_decides(tiny_model):
    """Two ranks share three KV heads, and the second rank has two of them."""
    changes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    path = tiny_model("llama", changes=changes)
    block = 2 * 4 * 8 * 4 * 3  # for each head, K and V of 4 tokens: 8 floats in each of 3 layers
    with ranked_engine(path, 2, kv_cache_memory_bytes=2 * 20 * block) as (engine, _):
        assert engine.facts.num_kv_blocks == 10
