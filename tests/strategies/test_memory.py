"""KV memory: no block is leaked or held twice, and failed calls change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.configuration.kv_layout import KVLayout
from strategies.memory.base import Span
from strategies.memory.blocks import PagedMemory
from strategies.memory.pool import BlockPool
from strategies.memory.slots import SlotMemory


@settings(max_examples=100)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60),
    kind=st.sampled_from([PagedMemory, SlotMemory]),
)
def test_random_growth_and_release(steps, kind):
    memory = kind(10, KVLayout.uniform(4))
    for sequence_id, num_tokens in steps:
        before = memory.held(sequence_id)
        if num_tokens == 0 or (kind is SlotMemory and before):
            memory.release(sequence_id)
            assert memory.held(sequence_id) == []
        elif memory.reserve([Span(sequence_id, 0, num_tokens)]):
            assert len(memory.held(sequence_id)) >= memory.blocks_for([num_tokens])
            assert memory.held(sequence_id)[: len(before)] == before
        else:
            assert memory.held(sequence_id) == before, "a failed call changes nothing"
        memory.check_integrity()


def test_a_shared_block_is_free_only_after_its_last_release():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.check_integrity([blocks, blocks])
    pool.release(blocks)
    assert pool.num_free == 1
    pool.check_integrity([blocks])
    pool.release(blocks)
    assert pool.num_free == 3


def test_releasing_a_block_twice_is_caught():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_integrity_check_catches_a_leak():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_integrity([])


def test_slots_are_contiguous_and_gaps_are_reused():
    memory = SlotMemory(10, KVLayout.uniform(4))
    assert memory.reserve([Span(1, 0, 16)])
    assert memory.reserve([Span(2, 0, 8)])
    assert memory.reserve([Span(3, 0, 16)])
    memory.release(2)
    assert not memory.reserve([Span(4, 0, 12)]), "three blocks do not fit into a gap of two"
    assert memory.reserve([Span(5, 0, 8)])
    assert memory.held(5) == [4, 5]
