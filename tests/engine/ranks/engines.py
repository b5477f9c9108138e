"""Whole engines on several ranks. All ranks but rank 0 are threads."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from core.configuration.options import make_options
from core.sampling import Finish
from engine.build import build_rank_0, load
from engine.builders.lead import leading
from engine.builders.packed import build_parts
from engine.engine import Engine
from engine.phases import Phases
from engine.ranks.follower import Follower
from engine.ranks.leader import Leader
from engine.ranks.order_types import AnyOrder
from strategies.factory import StrategySettings, make_strategy
from tests.engine.lora.adapter_files import registry
from tests.engine.ranks.threads import thread_groups

CPU = torch.device("cpu")


class ThreadFollowers:
    """Stands in for `engine.ranks.followers.Followers`: orders go through msgpack, as on a pipe."""

    def __init__(self, path, options, groups):
        self._groups = groups
        self._orders = [queue.SimpleQueue() for _ in groups]
        self._error = None
        self.orders = []
        self._threads = [
            threading.Thread(target=self._run, args=(path, options, *pair), daemon=True)
            for pair in zip(groups, self._orders, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, order):
        self.orders.append(order)
        message = msgspec.msgpack.encode(order)
        for orders in self._orders:
            orders.put(message)

    @contextmanager
    def raising_cause(self):
        try:
            yield
        except threading.BrokenBarrierError as error:
            raise self._error from error

    def close(self):
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, path, options, group, orders):
        try:
            loaded = load(path, options, CPU, Phases(), group)
            parts = build_parts(loaded.resolved, loaded.model, Phases(), group)
            follower = Follower(parts.passes, parts.columns, group, parts.features)
            while (message := orders.get()) is not None:
                follower.run(msgspec.msgpack.decode(message, type=AnyOrder))
        except Exception as error:
            self._error = error
            group.abort()


@contextmanager
def ranked_engine(path, size, **options):
    """Yield an engine on `size` ranks, and its followers."""
    given, path = make_options({"dtype": "fp32", "block_size": 4} | options), Path(path)
    first, *others = thread_groups(size)
    followers = ThreadFollowers(path, given, others)
    try:
        lead = None
        if others:
            lead = leading(Leader(followers.send, followers.raising_cause, first))
        yield build_rank_0(path, given, CPU, Phases(), first, lead), followers
    finally:
        if others and followers._error is None:
            followers.close()


def with_strategy(engine, batching, *, num_blocks, kv_reservation="max"):
    """Return an engine with the executor of `engine` and a strategy of its own."""
    facts, layout = engine.facts, engine.strategy.memory.layout
    settings = StrategySettings(
        batching=batching,
        num_blocks=layout.blocks_for(num_blocks * facts.block_size),
        layout=layout,
        max_model_len=facts.max_model_len,
        limits=engine.strategy.limits,
        max_delay_s=0.0,
        kv_reservation=kv_reservation,
        enable_prefix_caching=True,
        preemption_mode="recompute",
        num_swap_blocks=0,
    )
    return Engine(make_strategy(settings), engine.executor, facts, overlaps=engine.overlaps)


def answers(engine, prompts, params, adapter=""):
    """Return the tokens of each answer to each prompt. No request may fail."""
    parts = registry(engine).parts(adapter) if adapter else ()
    ids = [engine.add(prompt, params, time.monotonic(), parts) for prompt in prompts]
    tokens = {}
    while engine.has_work():
        for output in engine.step(time.monotonic()):
            assert output.finish != Finish.ERROR, output.failure
            tokens.setdefault((ids.index(output.request_id), output.index), []).extend(
                output.token_ids
            )
    return [tokens[key] for key in sorted(tokens)]
