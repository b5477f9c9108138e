"""How a step that hangs is distinguished from a step that computes."""

from __future__ import annotations

import threading
import time

from engine.serve.stall_timer import Activity, StallTimer


def test_a_stall_is_timed_while_nothing_runs() -> None:
    active = iter([True, False, False, False, True, False])
    timer = StallTimer(lambda: next(active))
    found = [timer.seconds(2.0 + now, now) for now in range(6)]
    assert found == [0, 0, 1, 2, 0, 0]


def test_a_step_that_has_just_begun_is_not_looked_at() -> None:
    def fail() -> bool:
        raise AssertionError("/proc was read")

    assert StallTimer(fail).seconds(0.5, 7.0) == 0


def test_threads_that_wait_are_not_active() -> None:
    """Another thread of this process sleeps, computes and sleeps again."""
    found: list[bool] = []
    done = threading.Event()

    def watch() -> None:
        activity = Activity()
        activity()
        deadline = time.monotonic() + 60
        while activity():  # until all other threads sleep; this one does not count itself
            assert time.monotonic() < deadline
            time.sleep(0.02)
        computes.set()
        time.sleep(0.2)
        found.append(activity())
        stop.set()
        done.set()

    computes, stop = threading.Event(), threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    computes.wait()
    while not stop.is_set():
        pass
    done.wait()
    watcher.join()
    assert found == [True]


def test_without_proc_a_step_counts_as_busy(tmp_path) -> None:
    assert Activity(tmp_path / "none")()
