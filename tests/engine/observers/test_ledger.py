"""The law of receipts: they, and what has a name of its own, add up to the engine's wall clock."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest

from core.protocol.stats import Receipt
from core.sampling import SamplingParams
from engine.engine import Engine
from engine.observers.ledger import ROW, Ledger, joined
from engine.observers.payer import Payer
from engine.observers.recorder import Recorder
from tests.engine.serve.serving import FACTS
from tests.strategies.fakes import FakeExecutor, strategy_of
from tests.strategies.fuzz import ONE_GROUP, SEVERAL_GROUPS, Groups, Run, RunWithStates
from tests.strategies.speculation.test_speculation import DraftRun

NUM_SEEDS = {Run: 12, DraftRun: 5, RunWithStates: 5}


class Clock:
    """Every reading is later, by a random number of nanoseconds that no sum divides evenly."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.now = 1

    def __call__(self) -> int:
        self.now += self._rng.randrange(1, 1_000_003)
        return self.now


class Checked(Ledger):
    """Checks the law at the end of each step, and collects the receipts."""

    def __init__(self, strategy, clock) -> None:
        super().__init__(strategy, clock)
        self.clock = clock
        self.receipts: dict[int, Receipt] = {}

    def added(self, request) -> None:
        super().added(request)
        self.receipts[request.id] = self._accounts[request.id].receipt

    def ends(self, outputs):
        outputs = super().ends(outputs)
        charged = sum(receipt.compute_ns for receipt in self.receipts.values())
        assert charged == self.num_charged_ns()
        assert charged + sum(self.others.values()) == self.clock.now - self.began_ns
        for output in outputs:
            if output.receipt is not None:
                assert output.receipt is self.receipts[output.request_id]
        return outputs


@pytest.mark.parametrize("kind", NUM_SEEDS)
def test_receipts_and_the_rest_add_up_to_the_wall_clock(kind: type[Run]) -> None:
    """Whatever is preempted, swapped, cancelled or lost, or raised by a strategy."""
    counts: Counter[str] = Counter()
    strategies: Counter[str] = Counter()
    others: Counter[str] = Counter()
    closed = Receipt()
    for index, groups in enumerate((ONE_GROUP, *SEVERAL_GROUPS.values())):
        for seed in range(index * NUM_SEEDS[kind], (index + 1) * NUM_SEEDS[kind]):
            ledger = run_with_ledger(seed, counts, groups, kind, strategies)
            assert not ledger._accounts, "a receipt was never closed"
            assert not ledger._of_sequence
            others += ledger.others
            closed.add(ledger.closed)
    assert len(strategies) == 4
    if kind is not Run:
        return
    assert {name for name, count in counts.items() if count > 0} >= {
        "aborts", "preemptions", "swaps", "lost steps", "no memory", "failed sequences",
    }  # fmt: skip
    assert set(others) - {"moves"} == {"idle", "between_steps", "scheduling", "ended"}
    assert set(closed.queued_ns) == {"step", "slots", "blocks", "batch", "budget", "priority"}
    assert closed.num_preemptions > 0
    assert closed.num_cached_tokens > 0
    assert 0 < closed.kv_shared_block_ns < closed.kv_block_ns


def run_with_ledger(
    seed: int, counts: Counter[str], groups: Groups, kind: type[Run], strategies: Counter[str]
) -> Checked:
    run = kind(seed, counts, groups)
    ledger = Checked(run.strategy, Clock(seed))
    run.engine.observer = ledger
    logging.disable()
    try:
        run.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, {groups}")
        raise
    finally:
        logging.disable(logging.NOTSET)
    strategies[run.batching] += 1
    return ledger


class Ticking:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Slow(FakeExecutor):
    def __init__(self, clock: Ticking, step_ns: int) -> None:
        super().__init__(4)
        self.clock, self.step_ns = clock, step_ns

    def run(self, plan):
        self.clock.now += self.step_ns
        return super().run(plan)


def engine_of(step_ns: int, **settings):
    clock, strategy = Ticking(), strategy_of("paged", **settings)
    engine = Engine(strategy, Slow(clock, step_ns), FACTS)
    ledger = Ledger(strategy, clock)
    engine.observer = joined([Recorder(strategy, lambda frames: None), ledger])
    return engine, ledger, clock


def drain(engine: Engine) -> dict[int, Receipt]:
    found = {}
    while engine.has_work():
        for output in engine.step(0.0):
            if output.receipt is not None:
                found[output.request_id] = output.receipt
    return found


def params(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def test_a_request_alone_pays_for_its_steps() -> None:
    engine, ledger, clock = engine_of(1000)
    clock.now = 50
    id = engine.add([5, 6, 7, 8, 9], params(3), 0.0)
    clock.now = 70
    receipt = drain(engine)[id]
    assert receipt.compute_ns == 3 * 1000
    assert receipt.queued_ns == {"step": 20}
    # Two blocks of four tokens hold the five tokens of the prompt and the two after it.
    assert receipt.kv_block_ns == 2 * 3000
    assert (receipt.kv_shared_block_ns, receipt.num_cached_tokens) == (0, 0)
    assert +ledger.others == {"idle": 70}


def test_a_step_is_divided_by_rows_and_keys() -> None:
    engine, _, _ = engine_of(10**9)
    first, second = (
        engine.add([5 + id] * length, params(1), 0.0) for id, length in ((0, 2), (1, 6))
    )
    receipts = drain(engine)
    weights = 2 * ROW + 3, 6 * ROW + 21
    assert receipts[first].compute_ns == 10**9 * weights[0] // sum(weights)
    assert receipts[first].compute_ns + receipts[second].compute_ns == 10**9


def test_a_cached_prefix_is_shared() -> None:
    engine, _, _ = engine_of(1000)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    engine.add(prompt, params(1), 0.0)
    drain(engine)
    id = engine.add(prompt, params(1), 0.0)
    receipt = drain(engine)[id]
    assert receipt.num_cached_tokens == 8
    assert (receipt.kv_block_ns, receipt.kv_shared_block_ns) == (3 * 1000, 2 * 1000)


def test_why_a_request_waits() -> None:
    engine, _, _ = engine_of(1000, max_sequences=1)
    engine.add([5], params(2), 0.0)
    second = engine.add([6], params(1, priority=1), 0.0)
    third = engine.add([7], params(2), 0.0)
    receipts = drain(engine)
    assert receipts[third].queued_ns == {"slots": 2000}
    assert receipts[second].queued_ns == {"priority": 2000, "slots": 2000}


def test_blocks_are_named() -> None:
    engine, _, _ = engine_of(1000, num_blocks=12, max_model_len=48)
    engine.add([5] * 40, params(2), 0.0)
    second = engine.add([6] * 12, params(1), 0.0)
    receipts = drain(engine)
    assert receipts[second].queued_ns.keys() <= {"blocks", "budget"}
    assert receipts[second].queued_ns["blocks"] > 0


def test_metrics_count_all_of_the_time() -> None:
    engine, ledger, clock = engine_of(2 * 10**9)
    clock.now = 10**9
    engine.add([5], params(2), 0.0)
    engine.add([6], params(1), 0.0)
    drain(engine)
    seconds, queued, blocks = ledger.totals()
    assert seconds.name == "longshore:engine_seconds"
    assert seconds.values == {"idle": 1.0, "between_steps": 0.0, "requests": 4.0}
    assert queued.values == {}
    assert blocks.values == {"": 6.0}


def test_api_keys_have_totals_of_their_own() -> None:
    engine, ledger, _ = engine_of(10**9)
    for name, num_tokens in (("ours", 2), ("theirs", 1), ("ours", 1)):
        engine.add([5], params(num_tokens), 0.0, (Payer(name),))
        drain(engine)
    engine.add([5], params(1), 0.0)
    drain(engine)
    totals = {total.name: total.values for total in ledger.totals() if total.label == "api_key"}
    assert totals == {
        "longshore:api_key_requests": {"ours": 2, "theirs": 1},
        "longshore:api_key_compute_seconds": {"ours": 3.0, "theirs": 1.0},
        "longshore:api_key_queued_seconds": {"ours": 0.0, "theirs": 0.0},
        "longshore:api_key_kv_block_seconds": {"ours": 3.0, "theirs": 1.0},
    }


def test_an_aborted_request_has_paid_too() -> None:
    engine, ledger, clock = engine_of(1000)
    id = engine.add([5], params(9), 0.0)
    engine.step(0.0)
    engine.abort(id)
    assert ledger.closed.compute_ns == 1000
    clock.now += 500
    engine.step(0.0)
    assert +ledger.others == {"idle": 500}
