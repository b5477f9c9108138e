"""Builds an engine whose model several ranks share, in the process of rank 0."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from core.configuration.options import Options
from core.errors import LongshoreError
from engine.engine import Engine
from engine.phases import Phases
from engine.ranks.followers import Followers, threads_for_ranks
from engine.ranks.group import Group, ProcessGroup
from engine.ranks.leader import Leader
from engine.ranks.shard import Shard


def build_on_ranks(
    build: Callable[[Group, Leader], Engine],
    model_dir: Path,
    options: Options,
    degree: int,
    device: torch.device,
    phases: Phases,
    on_lost: Callable[[LongshoreError], None],
    rank_address: str,
) -> Engine:
    """Start the other ranks, wait for them, and let `build` build rank 0's engine.

    The engine's `close` ends the other ranks. For the other arguments see `build_engine`.
    """
    closing = ExitStack()
    try:
        closing.enter_context(threads_for_ranks(degree // options.layout.nodes, device))
        followers = Followers(model_dir, options, degree, device, on_lost, rank_address)
        closing.callback(followers.close)
        followers.wait()
        timeout_s = options.execution.model_loading_timeout
        group = ProcessGroup(Shard(0, degree), device, followers.address, timeout_s)
        closing.callback(group.close)
        phases.end(f"{degree} ranks")
        with followers.raising_cause():
            engine = build(group, Leader(followers.send, followers.raising_cause, group))
    except BaseException:
        closing.close()
        raise
    engine.close = closing.close
    atexit.register(closing.close)
    return engine
