"""Prefix caching: hits, misses and the order of eviction."""

from __future__ import annotations

import pytest

from core.configuration.kv_layout import KVLayout
from core.request import Request
from core.sampling import SamplingParams
from core.sequence import Sequence
from strategies.memory.prefix import PrefixCache
from tests.strategies.fakes import FakeExecutor, fail, strategy_of

PROMPT = list(range(1, 13))
"""Three blocks of four tokens."""


def run(strategy, prompt, id=0, **params):
    """Run one request to its end and return the number of tokens computed by each step."""
    sampling_params = SamplingParams(**({"max_tokens": 1, "ignore_eos": True} | params))
    strategy.add(Request(id, prompt, sampling_params))
    executor = getattr(strategy, "executor", None) or FakeExecutor(4)
    strategy.executor, computed = executor, []
    while strategy.has_work():
        plan = strategy.schedule(0.0)
        computed.append(plan.num_tokens)
        strategy.commit(plan, executor.run(plan))
        strategy.memory.check_integrity()
    return computed


def test_a_cached_prefix_is_not_recomputed():
    strategy = strategy_of("paged")
    assert run(strategy, [*PROMPT, 13, 14]) == [14]
    assert run(strategy, [*PROMPT, 15, 16, 17]) == [3]
    assert (strategy.num_prefix_queries, strategy.num_prefix_hits) == (29, 12)
    assert run(strategy, [9, *PROMPT]) == [13], "the prompt does not begin with PROMPT"


def test_the_last_prompt_token_is_always_computed():
    strategy = strategy_of("paged")
    assert run(strategy, PROMPT) == [12]
    assert run(strategy, PROMPT) == [4]


def test_the_next_turn_of_a_conversation_reuses_the_answer():
    strategy = strategy_of("paged", max_step_tokens=32)
    strategy.add(request := Request(0, PROMPT, SamplingParams(max_tokens=9, ignore_eos=True)))
    run(strategy, [22], id=1)
    conversation = [*request.sequences[0].token_ids, 3, 4]
    assert len(conversation) == 23
    assert run(strategy, conversation) == [3], "all but the answer's last token had been computed"


@pytest.mark.parametrize(
    ("settings", "params"),
    [({"enable_prefix_caching": False}, {}), ({}, {"cache_salt": "another tenant"})],
)
def test_no_prefix_is_found_without_caching_or_with_another_salt(settings, params):
    strategy = strategy_of("paged", **settings)
    run(strategy, [*PROMPT, 13])
    assert run(strategy, [*PROMPT, 14], **params) == [13]


def test_equal_salts_share_blocks():
    strategy = strategy_of("paged")
    run(strategy, [*PROMPT, 13], cache_salt="a")
    assert run(strategy, [*PROMPT, 14], cache_salt="a") == [1]


def test_a_step_in_flight_caches_nothing():
    strategy = strategy_of("paged", max_step_tokens=32)
    strategy.add(Request(0, PROMPT, SamplingParams(max_tokens=4)))
    strategy.schedule(0.0)
    strategy.add(Request(1, PROMPT, SamplingParams(max_tokens=4)))
    [_, late] = strategy.schedule(0.0).chunks
    assert (late.sequence.id, late.start) == (1, 0)


def test_a_failed_step_caches_nothing():
    strategy = strategy_of("paged")
    strategy.add(Request(0, PROMPT, SamplingParams(max_tokens=4)))
    fail(strategy, strategy.schedule(0.0))
    assert run(strategy, PROMPT, id=1) == [12]


def test_the_deepest_of_the_blocks_released_together_is_evicted_first():
    strategy = strategy_of("paged", num_blocks=7, max_step_tokens=32)
    run(strategy, [*PROMPT, 1])
    run(strategy, [2] * 17, id=1)  # five blocks: the four free ones and a cached one
    assert run(strategy, [*PROMPT, 1], id=2) == [5], "two of the three cached blocks are left"


def test_the_least_recently_used_block_is_evicted_first():
    strategy = strategy_of("paged", num_blocks=7)
    run(strategy, [*PROMPT, 1])
    run(strategy, [*range(11, 19), 1], id=1)
    run(strategy, [*PROMPT[:4], 1], id=2)  # the first block of the first prompt is used again
    assert strategy.memory.num_held_blocks == 0
    # Two blocks are free and five cached; four are needed, so two cached ones are evicted.
    run(strategy, [2] * 13, id=3)
    assert run(strategy, [*PROMPT, 1], id=4) == [9], "two of PROMPT's blocks were evicted"
    assert run(strategy, [*range(11, 19), 1], id=5)[0] > 1


def test_identical_blocks_are_merged():
    strategy = strategy_of("paged", max_step_tokens=32)
    for id in range(2):
        strategy.add(Request(id, PROMPT, SamplingParams(max_tokens=6, ignore_eos=True)))
    executor = FakeExecutor(4)
    plan = strategy.schedule(0.0)
    tables = [chunk.tables[0].blocks for chunk in plan.chunks]
    assert not set(tables[0]) & set(tables[1]), "neither found the other's block"
    strategy.commit(plan, executor.run(plan))
    assert strategy.memory.num_held_blocks == 3
    while strategy.has_work():
        plan = strategy.schedule(0.0)
        strategy.commit(plan, executor.run(plan))
        strategy.memory.check_integrity()


def test_hashes_are_unpredictable():
    def key(cache, salt=""):
        params = SamplingParams(cache_salt=salt)
        return cache.key(0, Sequence(0 if salt else 1, PROMPT, params), 0)

    cache, other = (PrefixCache(KVLayout.uniform(4).groups) for _ in range(2))
    assert key(cache) != key(other)
    assert key(cache) != key(cache, "salt")
    cache.add(5, key(cache))
    assert cache.has(key(cache))
    assert not cache.has(key(cache, "salt"))
    cache.remove(5)
    assert not cache.has(key(cache))
    assert len(cache) == 0
