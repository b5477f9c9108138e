"""Block tables on the device always equal those of the plan, and only changes are sent.

Whatever a step leaves behind (sequences that were aborted, preempted or swapped, plans that failed)
may stay in the device's tensor; no later step may read it.
"""

from __future__ import annotations

import random

import pytest
import torch

from core.configuration.kv_layout import KVLayout
from core.plan import BlockTable, Chunk, StepPlan
from core.sampling import Sampled, SamplingParams
from core.sequence import Sequence
from engine.staging import Staging
from engine.step.step_inputs import InFlight, InputBuilder
from tests.strategies.fakes import Arrival, drive, fail, requests_of, strategy_of

BLOCK_SIZE = 4
GROUPS = KVLayout.uniform(BLOCK_SIZE).groups
CPU = torch.device("cpu")


class CountingStaging(Staging):
    """Counts the bytes of each upload. An upload may fail before its copy."""

    def __init__(self, failures=None):
        super().__init__(CPU)
        self.num_bytes = []
        self._failures = failures or (lambda: False)

    def upload(self, arrays):
        self.num_bytes.append(sum(array.nbytes for array in arrays))
        if self._failures():
            raise torch.OutOfMemoryError("no memory for the copy")
        return super().upload(arrays)


def check_tables(batch, plan):
    """Check that every entry up to the end of a context is the plan's. Decodes come first."""
    chunks = sorted(plan.chunks, key=lambda chunk: chunk.length > 1)
    assert len(batch.block_tables) == len(chunks)
    for row, chunk in zip(batch.block_tables.tolist(), chunks, strict=True):
        num_used = -(-chunk.end // BLOCK_SIZE)
        assert row[:num_used] == list(chunk.tables[0].blocks[:num_used])


def arrivals(seed):
    """Return requests. Half are aborted, prompts share prefixes, and some have several answers."""
    rng = random.Random(seed)
    return [
        Arrival(
            time=rng.randrange(40),
            num_prompt_tokens=rng.randint(1, 22),
            max_tokens=rng.randint(1, 20),
            abort_after=rng.choice([None, rng.randrange(20)]),
            abort_in_step=rng.random() < 0.5,
            prompt_seed=rng.choice([None, 1, 2]),
            params=rng.choice([{}, {"n": 3}, {"priority": 1}, {"use_beam_search": True, "n": 2}]),
        )
        for _ in range(40)
    ]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(4))
def test_tables_of_every_step_are_the_plans(mode, overlaps, seed):
    """The steps have preemption, swapping, copy-on-write, cached prefixes, aborts and beams."""
    strategy = strategy_of("paged", num_blocks=14, preemption_mode=mode, num_swap_blocks=30)
    builder, num_checked = InputBuilder(GROUPS, Staging(CPU)), 0

    def check(plan):
        nonlocal num_checked
        if plan is not None and plan.chunks:
            in_flight = InFlight(CPU)
            in_flight.keep([(plan.chunks, torch.zeros(len(plan.chunks), dtype=int))])
            check_tables(builder.build(plan, in_flight=in_flight).batch, plan)
            num_checked += 1

    drive(strategy, arrivals(seed), check, overlaps=overlaps)
    assert num_checked > 100
    assert strategy.num_preemptions > 0
    assert strategy.num_prefix_hits > 0
    assert (strategy.num_swaps > 0) == (mode == "swap")


@pytest.mark.parametrize("seed", range(4))
def test_a_step_after_failed_ones_has_the_right_tables(seed):
    """A plan fails before or after its tables are sent; its sequences end, others go on."""
    rng = random.Random(seed)
    builder = InputBuilder(GROUPS, CountingStaging(lambda: rng.random() < 0.2))
    strategy = strategy_of("paged", num_blocks=40, max_sequences=3, max_step_tokens=6)
    for request in requests_of([Arrival(0, rng.randint(1, 12), 12) for _ in range(60)]):
        strategy.add(request)
    num_failed = num_checked = 0
    while (plan := strategy.schedule(0.0)) is not None:
        try:
            inputs = builder.build(plan)
            check_tables(inputs.batch, plan)
            num_checked += 1
            if rng.random() < 0.1:
                raise torch.OutOfMemoryError("in the forward pass")
        except torch.OutOfMemoryError:
            num_failed += 1
            fail(strategy, plan)
        else:
            sampled = {
                c.sequence.id: Sampled((7,), (-1.0,)) for c in plan.chunks if c.samples_token
            }
            strategy.commit(plan, sampled)
    assert num_failed > 10
    assert num_checked > 40


def decode(id, num_blocks, first_block=0):
    """Return a decode of the last token in a table of consecutive blocks."""
    length = num_blocks * BLOCK_SIZE
    sequence = Sequence(id, [1] * length, SamplingParams())
    blocks = tuple(range(first_block, first_block + num_blocks))
    return Chunk(sequence, length - 1, 1, (BlockTable(blocks),), samples_token=True)


def test_an_unchanged_step_sends_no_tables_however_long_they_are():
    staging = CountingStaging()
    builder = InputBuilder(GROUPS, staging)
    short = [decode(id, 2) for id in range(15)]
    for _ in range(2):
        builder.build(StepPlan((*short, decode(15, 8192))))
    per_sequence = 8 * 5 + 4
    first, second = staging.num_bytes
    assert first > 12 * 8192
    assert second <= 16 * per_sequence + 64


def test_a_new_block_sends_one_entry_of_one_sequence():
    staging = CountingStaging()
    builder = InputBuilder(GROUPS, staging)
    others = [decode(id, 100) for id in range(1, 8)]
    plans = [StepPlan((decode(0, num_blocks), *others)) for num_blocks in (100, 100, 101)]
    for plan in plans:
        check_tables(builder.build(plan).batch, plan)
    _, unchanged, grown = staging.num_bytes
    assert unchanged <= 8 * (8 * 5 + 4) + 64
    assert grown == unchanged + 8 + 4, "a position and a block"


def test_sequences_that_take_turns_keep_their_rows():
    """Two groups of sequences run in turn, as sequences with a grammar do when steps overlap."""
    staging = CountingStaging()
    builder = InputBuilder(GROUPS, staging)
    plans = [
        StepPlan(tuple(decode(id, 50, first_block=id) for id in ids))
        for ids in (range(8), range(8, 16))
    ]
    for plan in plans * 3:
        check_tables(builder.build(plan).batch, plan)
    assert all(count < 12 * 50 for count in staging.num_bytes[2:])


def test_a_sequence_that_lost_its_row_gets_its_whole_table_again():
    """More sequences take turns than there are rows. Their tables stay the same objects."""
    builder = InputBuilder(GROUPS, Staging(CPU))
    plans = [
        StepPlan(tuple(decode(id, 5, first_block=id) for id in range(first, first + 4)))
        for first in range(0, 40, 4)
    ]
    for plan in plans * 3:
        check_tables(builder.build(plan).batch, plan)


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_table_that_could_not_be_sent_is_sent_again(num_before):
    staging = CountingStaging(lambda: len(staging.num_bytes) == num_before + 1)
    builder = InputBuilder(GROUPS, staging)
    for _ in range(num_before):
        builder.build(StepPlan((decode(0, 5),)))
    plan = StepPlan((decode(0, 6), decode(1, 6, first_block=9)))
    with pytest.raises(torch.OutOfMemoryError):
        builder.build(plan)
    check_tables(builder.build(plan).batch, plan)


def test_rows_are_reused_as_new_sequences_replace_old_ones():
    builder = InputBuilder(GROUPS, Staging(CPU))
    for id in range(100):
        plan = StepPlan((decode(id, 1 + id % 7, id), decode(id + 1, 1 + (id + 1) % 7, id + 1)))
        check_tables(builder.build(plan).batch, plan)


@pytest.mark.parametrize("new", [(1, 2, 9, 4), (1, 2), (5,), (1, 2, 3, 4, 5), (9, 1, 2, 3, 4)])
def test_any_change_of_a_table_reaches_the_device(new):
    """The new table has a replaced entry (copied on write), is shorter (recomputed) or longer."""
    builder, sequence = (
        InputBuilder(GROUPS, Staging(CPU)),
        Sequence(0, [1] * 20, SamplingParams()),
    )
    for blocks in ((1, 2, 3, 4), new, (1, 2, 3, 4)):
        end = len(blocks) * BLOCK_SIZE
        plan = StepPlan((Chunk(sequence, end - 1, 1, (BlockTable(blocks),), samples_token=True),))
        check_tables(builder.build(plan).batch, plan)
