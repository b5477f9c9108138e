"""The work list that the device makes for prefills, in the interpreter; see ../conftest.py."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from kernels.attention.prefill_work import MIN_SPLIT_KEYS, is_any_split, make_prefill_work
from kernels.attention.work_list import WAVES

BATCHES = {
    "a chunk after a prefix": [(20, 30020)],
    "whole prompts": [(500, 500), (1, 1), (2100, 2100)],
    "a long prefix among prompts": [(40, 40), (300, 300), (20, 131092), (64, 64), (700, 700)],
    "chunks and padding": [(100, 8292), (0, 0), (0, 50), (33, 4000), (129, 3000), (0, 0)],
    "nothing": [(0, 0), (0, 9000)],
}


@pytest.fixture(autouse=True)
def _filled_memory():
    """Let torch fill new tensors with large numbers, so that entries that are not written show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def listed(lengths, tile, num_splits, *, num_tokens=None, dtype=torch.int32, **options):
    """Make a list, check its layout, and return the spans of tiles by sequence and first token."""
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0)
    contexts = torch.tensor([context for _, context in lengths])
    num_tokens = num_tokens or int(starts[-1])
    tensors = (starts.to(dtype), contexts.to(dtype))
    work = make_prefill_work(*tensors, tile, num_tokens, num_splits, **options)
    block_q, _ = tile
    assert len(work.items) == num_splits + num_tokens // block_q + len(lengths)
    items = work.items.tolist()
    splits, whole = items[:num_splits], items[num_splits:]
    spans, slots = defaultdict(list), {}
    is_idle = [item[0] == -1 for item in splits]
    assert is_idle == sorted(is_idle), "the splits come first"
    for index, (sequence, token, begin, end) in enumerate(splits):
        if sequence != -1:
            spans[sequence, token].append((begin, end))
            slots.setdefault((sequence, token), index * block_q)
    live = [item for item in whole if item[0] != -1]
    assert live == sorted(live, reverse=True), "the last blocks first"
    for sequence, token, begin, end in live:
        assert (sequence, token) not in spans, "a block is either split or whole"
        spans[sequence, token].append((begin, end))
    expected_rows = [
        [int(starts[sequence]) + token + row, slot + row, len(spans[sequence, token])]
        for (sequence, token), slot in slots.items()
        for row in range(min(block_q, lengths[sequence][0] - token))
    ]
    rows = work.rows.tolist()
    assert rows[: len(expected_rows)] == expected_rows
    assert all(count == 0 for _, _, count in rows[len(expected_rows) :])
    return spans


def check_spans(spans, lengths, tile, window):
    """Check that the items of each block have all tiles that the block sees, once and in order."""
    block_q, block_n = tile
    blocks = [
        (sequence, token)
        for sequence, (new, _) in enumerate(lengths)
        for token in range(0, new, block_q)
    ]
    assert sorted(spans) == blocks
    for (sequence, token), items in spans.items():
        new, context = lengths[sequence]
        position = context - new + token
        first = 0 if window is None else max(position - window + 1, 0)
        assert items[0][0] == first // block_n
        assert items[-1][1] == -(-min(position + block_q, context) // block_n)
        assert all(begin < end for begin, end in items)
        assert all(end == begin for (_, end), (begin, _) in pairwise(items))


@pytest.mark.matrix
@pytest.mark.parametrize("window", [None, 100, 4096])
@pytest.mark.parametrize("num_splits", [0, 1, 9, 66, 400])
@pytest.mark.parametrize("name", BATCHES)
def test_items_divide_the_visible_keys(name, num_splits, window):
    lengths, tile = BATCHES[name], (32, 64)
    spans = listed(lengths, tile, num_splits, window=window)
    check_spans(spans, lengths, tile, window)
    if num_splits:
        is_split = any(len(items) > 1 for items in spans.values())
        assert is_split == is_any_split(lengths, 32, num_splits, window), (
            "the host foresees whether a block is split"
        )


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("tile", [(1, 16), (18, 64), (128, 64), (16, 16), (64, 128)])
def test_blocks_and_tiles_of_any_size(tile):
    """Splits may be as short as a tile."""
    lengths = [(7, 300), (70, 1000), (0, 20), (5, 5)]
    for num_splits, window in ((9, None), (200, None), (200, 150)):
        spans = listed(lengths, tile, num_splits, window=window, min_split_keys=tile[1])
        check_spans(spans, lengths, tile, window)
    block_q, block_n = tile
    (items,) = listed([(1, 1000)], tile, 4 * 200, min_split_keys=block_n).values()
    # The keys that the token sees, in units of block_q keys, divided by the units of a tile.
    assert len(items) == (999 // block_q + 1) // -(-block_n // block_q)


@pytest.mark.parametrize(("num_splits", "wanted"), [(9, 9), (66, 66), (400, 400 // WAVES)])
def test_shares_are_in_proportion_to_keys(num_splits, wanted):
    lengths = BATCHES["a long prefix among prompts"]
    fewest = MIN_SPLIT_KEYS * (1 if num_splits == 400 else WAVES)
    spans = listed(lengths, (32, 64), num_splits)
    keys = {
        (sequence, token): min(lengths[sequence][1] - lengths[sequence][0] + token + 32, 131092)
        for sequence, token in spans
    }
    for block, items in spans.items():
        share = keys[block] / sum(keys.values()) * wanted
        assert abs(len(items) - min(max(share, 1), keys[block] // fewest or 1)) <= 2
        assert all(64 * (end - begin) > fewest - 64 for begin, end in items) or (len(items) == 1)


def test_a_long_prefix_beside_2000_tokens_is_split():
    """An H200 has 132 processors, which run 16 blocks of 8 KV heads at once. Earlier versions split
    nothing here."""
    lengths = [(20, 131092), (2048, 2048)]
    spans = listed(lengths, (32, 64), 4 * 16)
    assert len(spans.pop((0, 0))) == 42, "two thirds of 64 splits, for two thirds of the keys"
    assert {len(items) for items in spans.values()} == {1}


def test_few_blocks_are_split_to_fill_the_gpu_once():
    """Padding does not count as blocks, so a graph splits like a step without padding."""
    chunk = (20, 131092)
    (items,) = listed([chunk], (32, 64), WAVES * 16).values()
    assert len(items) == 16
    padded = listed([chunk, *[(0, 0)] * 15], (32, 64), WAVES * 16, num_tokens=1024)
    assert padded == {(0, 0): items}
    spans = listed([chunk] * 9, (32, 64), WAVES * 16)
    assert sum(map(len, spans.values())) == 9 * 7, (
        "9 blocks fill more than half of the GPU, so splits may fill it four times"
    )


def test_a_window_bounds_the_splits():
    (items,) = listed([(20, 30020)], (32, 64), 64, window=2000).values()
    assert len(items) == 3, "at least 512 of 2000 keys each"


def test_the_blocks_of_one_sequence_see_more_keys_than_int32_can_count():
    lengths, window = [(5, 2**30)], 2**29
    spans = listed(lengths, (1, 64), 32, window=window)
    check_spans(spans, lengths, (1, 64), window)
    assert {len(items) for items in spans.values()} == {32 // 5}


@pytest.mark.matrix(cases=0)
@pytest.mark.parametrize(
    ("dtype", "tile", "window"), [(torch.int32, (1, 16), None), (torch.int64, (16, 16), 70_000)]
)
def test_many_sequences(dtype, tile, window):
    """There are more sequences than one step of the kernel's loops takes, and sums of keys that
    exceed int32."""
    rng = random.Random(3)
    lengths = [(new, new + rng.choice([0, 0, 90_000])) for new in rng.choices(range(4), k=150)]
    lengths[140] = (30, 1_000_000)
    spans = listed(lengths, tile, 800, window=window, dtype=dtype)
    check_spans(spans, lengths, tile, window)
    assert sum(len(items) for items in spans.values() if len(items) > 1) > 150
