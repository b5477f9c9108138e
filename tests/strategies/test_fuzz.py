"""The fuzz of the strategies with fixed seeds; `make soak` runs it for longer with others."""

from __future__ import annotations

from collections import Counter

import pytest

from core.plan import BlockTable
from strategies.memory.blocks import PagedMemory
from tests.strategies.fuzz import (
    ONE_GROUP,
    SEEDS_OF_DUPLICATES,
    SEVERAL_GROUPS,
    RunWithStates,
    fuzz,
)

NUM_SEEDS = 1500
NUM_PARTS = 10
KINDS = {
    "runs", "steps", "chunks", "requests", "answers", "aborts", "preemptions", "swaps",
    "no memory", "lost submits", "lost steps", "failed sequences", "exceptions", "failed requests",
}  # fmt: skip


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads(part):
    counts: Counter[str] = Counter()
    for seed in range(part, NUM_SEEDS, NUM_PARTS):
        fuzz(seed, counts)
    assert {kind for kind, count in counts.items() if count > 0} >= KINDS


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("groups", SEVERAL_GROUPS)
def test_random_workloads_with_several_cache_groups(groups):
    counts: Counter[str] = Counter()
    for seed in range(200):
        fuzz(seed, counts, SEVERAL_GROUPS[groups])
    assert {kind for kind, count in counts.items() if count > 0} >= KINDS


def test_random_workloads_with_states():
    """Each chunk's state is checked; a step that fails leaves states half done."""
    counts: Counter[str] = Counter()
    for seed in range(150):
        groups = ONE_GROUP if seed % 2 else SEVERAL_GROUPS["full, window 5"]
        fuzz(seed, counts, groups, RunWithStates)
    assert {kind for kind, count in counts.items() if count > 0} >= KINDS


@pytest.mark.parametrize("seed", SEEDS_OF_DUPLICATES)
def test_the_fuzz_finds_a_duplicate_block_that_is_replaced_in_one_table_only(monkeypatch, seed):
    def replace(self, sequence_id, cached):
        [(table, first)] = self._tables[sequence_id]
        old = [block for block in table if block in cached]
        self._pool.share(cached[block] for block in old)
        self._pool.release(old)
        replaced = tuple(cached.get(block, block) for block in table)
        self._tables[sequence_id] = (BlockTable(replaced, first),)

    monkeypatch.setattr(PagedMemory, "_replace", replace)
    with pytest.raises(AssertionError, match="has_room_for"):
        fuzz(seed, Counter())
