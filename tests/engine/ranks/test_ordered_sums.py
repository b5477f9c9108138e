"""Sums over ranks whose order does not depend on the batch (option.batch_invariant)."""

from __future__ import annotations

import pytest
import torch

from core.configuration.options import ExecutionOptions
from engine.ranks.process_group import OrderedGroup, join_group
from engine.shard import Shard
from tests.engine.ranks.threads import run_ranks


def test_an_ordered_group_adds_in_the_order_of_the_ranks():
    """In fp32, 1 is lost beside 1e8. In another order, the sum would be 1."""
    numbers = (1e8, 1.0, -1e8)

    def add(group):
        return OrderedGroup.sum(group, torch.tensor([numbers[group.rank], 0.5 + group.rank]))

    for total in run_ranks(3, add):
        assert total.tolist() == [0.0, 4.5]


@pytest.mark.parametrize("is_invariant", [False, True])
def test_the_option_selects_the_ordered_group(is_invariant, monkeypatch):
    made = []
    for kind in ("ProcessGroup", "OrderedGroup"):
        monkeypatch.setattr(
            f"engine.ranks.process_group.{kind}", lambda *_, kind=kind: made.append(kind)
        )
    options = ExecutionOptions(batch_invariant=is_invariant)
    join_group(Shard(0, 2), torch.device("cpu"), "", options)
    assert made == ["OrderedGroup" if is_invariant else "ProcessGroup"]
