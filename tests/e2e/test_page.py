"""The live page with real processes: the library executor, a lost engine, and a stop."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.container.processes import Caller
from tests.e2e.serving import LONG_ANSWER, long_winded, serve


@pytest.mark.matrix(cases=0)
def test_the_library_executor_is_shown_while_it_generates(tmp_path):
    properties = "option.batching=dynamic\noption.executor=library\nmax_batch_delay=10\n"
    model = long_winded(tmp_path)
    with serve(tmp_path, properties, model=model) as container, container.events() as events:
        name, about = next(events)
        assert (name, about["batching"], about["executor"]) == ("engine", "dynamic", "library")
        parameters = {"max_new_tokens": LONG_ANSWER, "ignore_eos": True}
        with Caller(container.port).open({"inputs": "ROMEO:", "parameters": parameters}):
            shown = next(
                data["snapshot"]
                for name, data in events
                if name == "snapshot" and data["snapshot"]["num_running"]
            )
        (sequence,) = shown["sequences"]
        assert sequence["num_prompt_tokens"] < sequence["max_length"]


@pytest.mark.matrix(cases=0)
def test_an_open_page_survives_the_engine_and_does_not_delay_the_stop(tmp_path):
    with serve(tmp_path, "retry_threshold=1\n") as container, container.events() as events:
        assert next(events)[0] == "engine"
        assert next(events)[0] == "snapshot"
        os.kill(container.engine, signal.SIGKILL)
        names = []
        while names[-2:] != ["engine", "snapshot"]:
            names.append(next(events)[0])
        assert "down" in names
        started = time.monotonic()
        assert container.stop() == 0
        assert time.monotonic() - started < 23, "a request would get 23 s, but a page gets none"
        assert all(name == "snapshot" for name, _ in events), "snapshots, then the end"
