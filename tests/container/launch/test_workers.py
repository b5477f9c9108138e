"""The number of worker processes follows from how busy they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from container.front_end.core_use import BUSY_SHARE, PERIOD_S, CoreUse
from container.front_end.start import worker_counts
from tests.clock import Clock
from tests.container.fake_engine import FakeEngine
from tests.container.http.test_frontend import write_launch
from tests.container.processes import Caller, children, running, wait_until

BUSY_FRONT_END = """
import container.front_end.start as start, container.front_end.core_use as core_use
core_use.PERIOD_S, core_use.BUSY_SHARE, start.num_cores = 0.0, -1.0, lambda: 12
start.main({parent!r}, {launch!r})
"""
"""A front end on 12 cores whose workers are always busy."""


def test_a_worker_is_busy_if_it_used_most_of_a_core_for_a_period() -> None:
    clock, cpu = Clock(), Clock()
    use = CoreUse(lambda: clock.now, lambda: cpu.now)
    clock.now += PERIOD_S / 2
    cpu.now += PERIOD_S / 2
    assert not use.is_high(), "the period has not ended"
    clock.now += PERIOD_S / 2
    cpu.now += PERIOD_S * (BUSY_SHARE - 0.49)
    assert use.is_high()
    clock.now += PERIOD_S
    assert not use.is_high(), "each period counts for itself"


@pytest.mark.parametrize(
    ("option", "cores", "counts"),
    [(None, 1, (1, 1)), (None, 7, (1, 1)), (None, 8, (1, 2)), (None, 64, (1, 16)), (5, 2, (5, 5))],
)
def test_how_many_workers_there_may_be(
    option: int | None, cores: int, counts: tuple[int, int]
) -> None:
    assert worker_counts(option, cores) == counts


@pytest.mark.parametrize(("option", "count"), [(None, 3), (2, 2)])
def test_busy_workers_get_help_unless_their_number_is_given(
    tmp_path: Path,
    tokenizer_dir: Path,
    engine: FakeEngine,
    endpoint: str,
    caller: Caller,
    option: int | None,
    count: int,
) -> None:
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port, http_workers=option)
    program = BUSY_FRONT_END.format(parent=str(os.getpid()), launch=str(launch))
    with running(["-c", program]) as process:
        wait_until(caller.is_healthy)
        wait_until(lambda: len(children(process.pid)) == count)
        assert caller.post({"inputs": "Q"})[0] == 200
        assert len(children(process.pid)) == count
        process.terminate()
        output = "".join(process.communicate())
    assert output.count("event=worker_added") == (0 if option else count - 1)
