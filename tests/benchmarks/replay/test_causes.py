"""Why a request waited: without the causes it starts at once, without fewer of them it does not."""

from __future__ import annotations

import pytest

from benchmarks.replay.page.causes import causes_of
from benchmarks.replay.page.tape import Tape
from core.configuration.strategy_table import BATCHING_NAMES, Batching
from tests.benchmarks.replay.checks import check_causes, check_law
from tests.benchmarks.replay.recordings import Ask, mixed_asks, random_asks, record


def test_blocks_that_two_requests_hold() -> None:
    """Of 10 blocks they hold 4 each. The third needs 7, and one more for each that runs."""
    asks = [Ask(0, 13, 4), Ask(0, 13, 4), Ask(0.02, 25, 4)]
    tape = Tape(record("paged", asks, num_blocks=10, max_step_tokens=64))
    [step, blocks] = check_causes(tape, 2)
    assert step.text.endswith("ms until the step that ran had ended")
    assert (blocks.reason, sorted(blocks.ids)) == ("blocks", [0, 1])
    assert blocks.text.endswith("ms for 8 blocks held by #0 and #1")
    assert blocks.until == tape.rows[2].admitted


def test_a_place_in_the_batch() -> None:
    asks = [Ask(0, 4, 8), Ask(0, 4, 12), Ask(0.001, 4, 4)]
    tape = Tape(record("continuous", asks, max_sequences=2))
    [_, slots] = check_causes(tape, 2)
    assert (slots.reason, slots.ids, slots.until) == ("slots", [0], tape.rows[2].admitted)


def test_a_queue_of_one_at_a_time() -> None:
    tape = Tape(record("none", [Ask(0.001 * id, 4, 4) for id in range(4)]))
    [_, queue] = check_causes(tape, 3)
    assert sorted(queue.ids) == [0, 1, 2]
    assert queue.until == tape.rows[3].admitted
    assert queue.text.endswith("for the place of #0, behind #1 and #2 in the queue")


def test_a_batch_that_is_not_full() -> None:
    tape = Tape(record("dynamic", [Ask(0, 4, 4), Ask(0.3, 4, 4)], max_delay_s=1.0))
    [batch] = causes_of(tape, 0)
    assert (batch.reason, batch.ids, batch.option) == ("batch", [], "max_batch_delay")
    assert batch.text == "1.0 s for the batch to fill (option.max_batch_delay)"


def test_the_tokens_of_a_step() -> None:
    asks = [Ask(0, 20, 4), Ask(0, 6, 4)]
    [budget] = check_causes(Tape(record("paged", asks, max_step_tokens=8)), 1)
    assert (budget.reason, budget.ids) == ("budget", [0])


def test_an_urgent_request_in_front() -> None:
    asks = [Ask(0, 4, 8), Ask(0.001, 4, 4, priority=5), Ask(0.002, 4, 4)]
    tape = Tape(record("continuous", asks, max_sequences=1))
    [_, queue] = check_causes(tape, 1)
    assert queue.ids == [0, 2]
    assert queue.text.endswith("behind #2 in the queue")


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_causes_of_random_traffic(batching: Batching) -> None:
    """Also of requests that were preempted."""
    asks = random_asks(seed=1, count=10, seconds=0.4)
    tape = Tape(record(batching, asks, num_blocks=9, max_sequences=4))
    assert tape.difference is None
    reasons = {cause.reason for id in tape.rows for cause in check_causes(tape, id)}
    assert reasons >= {"step", "slots" if batching in ("none", "dynamic") else "blocks"}
    if batching == "paged":
        assert any(row.breaks for row in tape.rows.values())


@pytest.mark.parametrize("batching", BATCHING_NAMES)
def test_a_recording_of_mixed_traffic_keeps_the_law_of_receipts(batching: Batching) -> None:
    recording = record(batching, mixed_asks(seed=2, count=20, seconds=1), num_blocks=18)
    law, difference = check_law(recording)
    assert difference is None
    assert law.num_steps > 20
    assert law.ledger.others["idle"] >= 0 < law.ledger.closed.compute_ns
