"""Snapshots of the batch and the KV blocks, and the clients that get them."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from core.configuration.kv_layout import CacheGroup, KVLayout
from core.configuration.strategy_table import BATCHING_NAMES
from core.protocol.snapshot import Snapshot
from core.protocol.stats import Timing
from engine.serve.watchers import (
    MAX_INTERVAL_S,
    MAX_SHARE,
    MAX_WAITING,
    MIN_INTERVAL_S,
    Watchers,
    block_runs,
    take_snapshot,
)
from tests.clock import Clock
from tests.strategies.fakes import Arrival, FakeExecutor, request_of, strategy_of

ENDLESS = {"ignore_eos": True}


class Outbox:
    """Keeps the snapshots that each client was sent."""

    def __init__(self):
        self.sent = []

    def send(self, client, message):
        self.sent.append((client, message.snapshot))


class Loop:
    """A strategy with requests, and the executor of its steps."""

    def __init__(self, arrivals, batching="paged", **changes):
        self.strategy = strategy_of(batching, **changes)
        self._executor = FakeExecutor(self.strategy.memory.layout)
        for number, arrival in enumerate(arrivals):
            self.strategy.add(request_of(arrival, number))

    def run(self, steps=1, now=10.0):
        for _ in range(steps):
            plan = self.strategy.schedule(now)
            if plan is not None:
                self.strategy.commit(plan, self._executor.run(plan))


def seen(strategy, now=11.0, first_tokens=()):
    snapshot = take_snapshot(strategy, (), dict(first_tokens).get, now)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot)


def blocks_of(sequence):
    runs = [run for table in sequence.tables for run in table]
    return [block for first, count in runs for block in range(first, first + count)]


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_a_snapshot_has_the_tables_and_counts_of_the_strategy(batching):
    loop = Loop([Arrival(0, 9, 20, params=ENDLESS)] * 3, batching)
    loop.run(4)
    snapshot = seen(loop.strategy, first_tokens={0: 10.5})
    assert snapshot.num_running == loop.strategy.num_running > 0
    assert snapshot.num_waiting == len(loop.strategy.waiting)
    assert snapshot.num_held_blocks == loop.strategy.memory.num_held_blocks > 0
    assert [sequence.id for sequence in snapshot.sequences] == [0, 1, 2]
    for sequence in snapshot.sequences:
        assert blocks_of(sequence) == loop.strategy.memory.held(sequence.id)
    first = snapshot.sequences[0]
    assert (first.phase, first.num_prompt_tokens, first.max_length) == ("decode", 9, 29)
    assert first.num_tokens == first.num_computed_tokens + 1 > 9
    assert (first.arrived, first.admitted, first.first_token) == (0, 10.0, 10.5)


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_a_snapshot_has_the_tables_of_each_cache_group(batching):
    groups = (CacheGroup(4, layers=(0, 2)), CacheGroup(4, 8, layers=(1,)))
    layout = KVLayout(groups, step_tokens=32)
    loop = Loop(
        [Arrival(0, 9, 30, params=ENDLESS)] * 2, batching, layout=layout, kv_reservation="oracle"
    )
    loop.run(24)
    snapshot = seen(loop.strategy)
    assert [(g.block_size, g.window, g.num_layers) for g in snapshot.groups] == [
        (4, None, 2), (4, 8, 1),
    ]  # fmt: skip
    sequence = snapshot.sequences[0]
    assert sequence.num_computed_tokens == 32
    assert blocks_of(sequence) == loop.strategy.memory.held(sequence.id)
    full, window = (sum(count for _, count in table) for table in sequence.tables)
    if batching == "paged":
        assert (full, window, sequence.freed) == (8, 2, [0, 6]), "position 32 reads from 25 on"
    else:
        assert (full, window, sequence.freed) == (10, 10, [0, 0]), "reserved as a ring"


def test_phases_of_a_chunked_prompt():
    loop = Loop([Arrival(0, 40, 4, params=ENDLESS)] * 2, "none", max_step_tokens=16)
    assert [sequence.phase for sequence in seen(loop.strategy).sequences] == ["waiting", "waiting"]
    phases = []
    for _ in range(4):
        loop.run()
        phases.append([sequence.phase for sequence in seen(loop.strategy).sequences])
    assert phases == [["prefill", "waiting"]] * 2 + [["decode", "waiting"]] * 2


@pytest.mark.parametrize(("mode", "phase"), [("swap", "swapped"), ("recompute", "preempted")])
def test_preempted_sequences_are_shown_as_such(mode, phase):
    arrivals = [Arrival(0, 7, 24, params=ENDLESS)] * 3
    loop = Loop(
        arrivals, num_blocks=12, max_step_tokens=64, preemption_mode=mode, num_swap_blocks=40
    )
    while loop.strategy.num_preemptions == 0:
        loop.run()
    newest = seen(loop.strategy).sequences[-1]
    assert (newest.id, newest.phase, newest.tables) == (2, phase, [[]])


def test_a_recomputed_answer_is_prefilled_again():
    arrivals = [Arrival(0, 7, 24, params=ENDLESS)] * 2
    loop = Loop(arrivals, num_blocks=9, max_step_tokens=4)
    while loop.strategy.num_preemptions == 0:
        loop.run()
    phases = []
    while loop.strategy.waiting:
        loop.run()
    while loop.strategy.running:
        phases += [sequence.phase for sequence in seen(loop.strategy).sequences]
        loop.run()
    assert phases[0] == "prefill", "the tokens already generated are computed again"
    assert phases[-1] == "decode"


def test_shared_and_kept_blocks():
    prompt = Arrival(0, 13, 2, prompt_seed=7, params=ENDLESS)
    loop = Loop([prompt] * 2, max_step_tokens=64)
    loop.run()
    first, second = (blocks_of(sequence) for sequence in seen(loop.strategy).sequences)
    assert first[:3] == second[:3], "three full blocks of the same prompt"
    assert first[3] != second[3]
    loop.run(5)
    snapshot = seen(loop.strategy)
    assert (snapshot.num_held_blocks, snapshot.sequences) == (0, [])
    assert sum(count for _, count in snapshot.kept_blocks) == 3
    assert snapshot.kept_blocks == [(first[0], 3)]


def test_slots_of_states_and_kept_ones():
    """Two samples share the state of their prompt until each computes a token of its own."""
    prompt = Arrival(0, 13, 2, prompt_seed=7, params=ENDLESS | {"n": 2})
    states = {"num_states": 6, "num_spare_states": 2, "num_checkpoints": 3}
    loop = Loop([prompt], max_step_tokens=64, **states)
    slots = []
    while loop.strategy.has_work() or not slots:
        loop.run()
        snapshot = seen(loop.strategy)
        slots.append([sequence.states for sequence in snapshot.sequences])
    assert snapshot.num_states == 9
    assert [len(states) for states in slots[0]] == [1, 0], "only one has begun"
    assert [len(states) for states in slots[1]] == [1, 1]
    assert slots[1][0] != slots[1][1]
    assert snapshot.kept_states == block_runs(sorted(loop.strategy.memory.states.kept_slots))
    assert sum(count for _, count in snapshot.kept_states) >= 1, "at the end of an answer"


def test_only_the_first_waiting_requests_are_listed():
    loop = Loop([Arrival(0, 3, 2)] * (MAX_WAITING + 5))
    snapshot = seen(loop.strategy)
    assert (len(snapshot.sequences), snapshot.num_waiting) == (MAX_WAITING, MAX_WAITING + 5)


def test_a_snapshot_has_no_tokens():
    loop = Loop([Arrival(0, 3, 9)])
    loop.run(2)
    names = {
        name for sequence in seen(loop.strategy).sequences for name in sequence.__struct_fields__
    }
    assert not names & {"token_ids", "prompt_token_ids", "params", "adapter", "logprobs"}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cpu_clock():
    return Clock()


@pytest.fixture
def outbox():
    return Outbox()


@pytest.fixture
def watchers(clock, cpu_clock, outbox):
    return Watchers(strategy_of("paged"), outbox.send, {}.get, clock, cpu_clock)


def watched(watchers, clock, seconds, every=0.01):
    """Call `update` as often as a loop does if its steps take `every` seconds."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += every
        if watchers:
            watchers.update()


def test_a_client_is_sent_ten_snapshots_a_second_until_its_time_is_up(watchers, clock, outbox):
    assert not watchers
    watchers.add(b"a", 2.0)
    assert watchers
    watched(watchers, clock, 5.0)
    assert not watchers
    assert 15 <= len(outbox.sent) <= 20
    assert {client for client, _ in outbox.sent} == {b"a"}


def test_a_later_watch_extends_the_time_and_a_lost_client_gets_nothing(watchers, clock, outbox):
    watchers.add(b"a", 1.0)
    watchers.add(b"b", 9.0)
    watchers.add(b"a", 3.0)
    watchers.remove(b"b")
    watched(watchers, clock, 2.0)
    assert watchers
    assert {client for client, _ in outbox.sent} == {b"a"}
    watchers.remove(b"a")
    assert not watchers


def test_all_clients_get_the_same_snapshot(watchers, clock, outbox):
    watchers.add(b"a", 1.0)
    watchers.add(b"b", 1.0)
    watchers.update()
    (_, first), (_, second) = outbox.sent
    assert first is second


def intervals(outbox):
    return [b - a for a, b in pairwise(snapshot.now for _, snapshot in outbox.sent)]


def test_costly_snapshots_take_a_limited_share_of_the_loop(watchers, clock, cpu_clock, outbox):
    watchers.add(b"a", 100.0)
    cpu_clock.step = 0.001  # what one snapshot takes
    for _ in range(200):
        clock.now += 0.02
        cpu_clock.now += 0.02  # a busy loop
        watchers.update()
    assert len(outbox.sent) > 10
    assert min(intervals(outbox)) > MIN_INTERVAL_S
    assert min(intervals(outbox)) > 0.001 / MAX_SHARE - 0.04
    assert max(intervals(outbox)) < 0.001 / MAX_SHARE + 0.04


def test_a_loop_that_gets_no_cpu_time_still_sends_snapshots(watchers, clock, cpu_clock, outbox):
    watchers.add(b"a", 100.0)
    cpu_clock.step = 0.001
    watched(watchers, clock, 5.0, every=0.1)
    assert max(intervals(outbox)) <= MAX_INTERVAL_S + 0.11


def test_answers_that_ended_are_in_one_snapshot(watchers, clock, outbox):
    watchers.add(b"a", 9.0)
    watchers.note_end(5, Timing(1.0, 2.0, 3.0, 4.0))
    watched(watchers, clock, 3 * MIN_INTERVAL_S)
    ended = [snapshot.ended for _, snapshot in outbox.sent]
    assert [(sequence.id, sequence.timing) for sequence in ended[0]] == [
        (5, Timing(1.0, 2.0, 3.0, 4.0))
    ]
    assert ended[1:] == [[]] * (len(ended) - 1)
