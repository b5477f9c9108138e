"""The work list that the device makes for decodes, in the interpreter; see ../conftest.py."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from kernels.attention.work_list import MIN_SPLIT_KEYS, UNIT, make_work_list

RAGGED = (131072, 500, 1, 0, 2047, 700, 4096)


def items_by_sequence(work):
    """Check the order of the items. Return (first key, end key) of each sequence's items."""
    found = defaultdict(list)
    assert work.rows[:, 0].tolist() == list(range(len(work.rows)))
    num_live = int(work.rows[:, 2].sum())
    for index, (sequence, first, end, count) in enumerate(work.items.tolist()):
        if index >= num_live:
            assert sequence == -1
            continue
        _, begin, num_items = work.rows[sequence].tolist()
        assert begin <= index < begin + num_items
        assert count == num_items
        found[sequence].append((first, end))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("lens", [torch.int32, torch.int64])
@pytest.mark.parametrize("window", [None, 100, 1000, 4096])
@pytest.mark.parametrize("num_wanted", [1, 7, 50, 400])
def test_items_divide_the_visible_keys(num_wanted, window, lens):
    contexts = torch.tensor(RAGGED, dtype=lens)
    work = make_work_list(contexts, num_wanted, window=window)
    assert len(work.items) == num_wanted + len(RAGGED)
    found = items_by_sequence(work)
    assert sorted(found) == list(range(len(RAGGED)))
    for sequence, context in enumerate(RAGGED):
        spans = found[sequence]
        visible = context if window is None else min(window, context)
        assert spans[0][0] == context - visible
        assert spans[-1][1] == context
        for (_, end), (first, _) in pairwise(spans):
            assert end == first
            assert first % UNIT == 0
        lengths = [end - first for first, end in spans]
        if len(spans) > 1:
            assert min(lengths) >= MIN_SPLIT_KEYS if window is None else min(lengths) > UNIT
        assert max(lengths) - min(lengths) <= 3 * UNIT


@pytest.mark.parametrize("num_wanted", [7, 50, 400])
def test_shares_are_in_proportion_to_keys(num_wanted):
    work = make_work_list(torch.tensor(RAGGED, dtype=torch.int32), num_wanted)
    for sequence, spans in items_by_sequence(work).items():
        share = RAGGED[sequence] / sum(RAGGED) * num_wanted
        most = max(1, RAGGED[sequence] // MIN_SPLIT_KEYS)
        assert abs(len(spans) - min(max(share, 1), most)) <= 1.1


def test_no_split_is_shorter_than_allowed():
    """Each context has as many splits as can have MIN_SPLIT_KEYS keys, although more are wanted."""
    contexts = (257, 383, 384, 385, 511, 512, 513, 640, 641, 767, 768, 769, 895, 1023, 1024)
    work = make_work_list(torch.tensor(contexts), 10_000)
    for context, spans in zip(contexts, items_by_sequence(work).values(), strict=True):
        assert len(spans) == context // MIN_SPLIT_KEYS
        assert min(end - first for first, end in spans) >= MIN_SPLIT_KEYS


@pytest.mark.parametrize("min_split_keys", [0, UNIT - 1, UNIT + 1])
def test_splits_are_of_whole_units(min_split_keys):
    with pytest.raises(ValueError, match="must be a multiple of 128"):
        make_work_list(torch.ones(2, dtype=torch.int32), 2, min_split_keys=min_split_keys)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("count", [1, 256, 300])
def test_any_number_of_sequences(count):
    contexts = torch.arange(count, dtype=torch.int32) * 7 % 3000
    work = make_work_list(contexts, 200)
    found = items_by_sequence(work)
    assert [found[sequence][-1][1] for sequence in range(count)] == contexts.tolist()


def test_each_row_of_padding_has_one_item_without_keys():
    work = make_work_list(torch.zeros(3, dtype=torch.int32), 10)
    assert items_by_sequence(work) == {row: [(0, 0)] for row in range(3)}
