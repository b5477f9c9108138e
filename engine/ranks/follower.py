"""A rank other than 0: carries out rank 0's orders on its own part of the model and KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.group import SharedFeature
from engine.ranks.group import RankGroup
from engine.ranks.order_types import AnyOrder, Change, Forward, Move
from engine.ranks.shared_inputs import empty, unpack
from engine.step.column import PerTokenColumn, RepeatableColumn
from engine.step.passes import Passes


class Follower:
    """Runs orders. Raises any error of the device; the rank cannot go on then."""

    def __init__(
        self,
        passes: Passes,
        columns: Sequence[PerTokenColumn | RepeatableColumn],
        group: RankGroup,
        features: Sequence[SharedFeature],
    ) -> None:
        """columns: those in which all ranks take part. features: those with weights."""
        self._passes = passes
        self._columns = columns
        self._group = group
        self._features = features

    @torch.inference_mode()
    def run(self, order: AnyOrder) -> None:
        match order:
            case Move(moves):
                self._passes.move(moves)
            case Forward():
                self._forward(order)
            case Change(index, change):
                self._features[index].carry_out(change)

    def _forward(self, forward: Forward) -> None:
        packed = empty(forward, self._group.device)
        self._group.broadcast(packed)
        self._passes.forward(unpack(packed, forward, self._columns), forward.graph)
