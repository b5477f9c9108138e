"""Builds an engine whose model several ranks share, in the process of rank 0."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from core.configuration.options import Options
from core.errors import LongshoreError
from engine.builders.packed import Lead, PackedParts
from engine.engine import Engine
from engine.group import Group
from engine.phases import Phases
from engine.ranks.degree import tensor_parallel_degree
from engine.ranks.followers import Followers, threads_for_ranks
from engine.ranks.leader import Leader
from engine.ranks.order_types import Change
from engine.ranks.process_group import join_group
from engine.shard import Shard
from engine.step.passes import Runner


def build_on_ranks(
    build: Callable[[Group, Lead | None], Engine],
    model_dir: Path,
    options: Options,
    device: torch.device,
    phases: Phases,
    on_lost: Callable[[LongshoreError], None],
    rank_address: str,
) -> Engine:
    """Start the other ranks, if there are any, and let `build` build rank 0's engine.

    The engine's `close` ends the other ranks. For the other arguments see `build_engine`.
    """
    degree = tensor_parallel_degree(options.execution, device, options.layout.nodes)
    if degree == 1:
        return build(Group(device), None)
    closing = ExitStack()
    try:
        closing.enter_context(threads_for_ranks(degree // options.layout.nodes, device))
        followers = Followers(model_dir, options, degree, device, on_lost, rank_address)
        closing.callback(followers.close)
        followers.wait()
        group = join_group(Shard(0, degree), device, followers.address, options.execution)
        closing.callback(group.close)
        phases.end(f"{degree} ranks")
        with followers.raising_cause():
            leader = Leader(followers.send, followers.raising_cause, group)
            engine = build(group, leading(leader))
    except BaseException:
        closing.close()
        raise
    engine.close = closing.close
    atexit.register(closing.close)
    return engine


def leading(leader: Leader) -> Lead:
    """Return a function that has all ranks run rank 0's steps, and get its features' weights."""

    def lead(parts: PackedParts) -> Runner:
        for index, feature in enumerate(parts.features):
            feature.share(lambda change, index=index: leader.send(Change(index, change)))
        return leader.leading(parts.passes)

    return lead
