"""A model on two ranks, in a container: what follows when one of them is lost."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.container.processes import wait_until
from tests.e2e.serving import IMAGE, LONG_ANSWER, START_S, long_winded, serve

PROPERTIES = """
option.device=cpu
option.dtype=fp32
option.tensor_parallel_degree=2
retry_threshold=1
"""

pytestmark = pytest.mark.skipif(bool(IMAGE), reason="signals processes of the checkout")


def rank_1(container):
    processes = psutil.Process(container.process.pid).children(recursive=True)
    [rank] = [process for process in processes if "engine.follow" in process.cmdline()]
    return rank


def is_ready(container):
    return container.request("GET", "/ping")[0] == 200


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(240)  # two processes start twice
def test_a_lost_rank_ends_its_requests_and_the_engine_starts_again(tmp_path):
    """Tests of ranks that hang instead of dying are in tests/engine/ranks."""
    with serve(tmp_path, PROPERTIES, model=long_winded(tmp_path)) as container:
        expected = container.invoke("ROMEO:", max_new_tokens=8)["generated_text"]
        lost = rank_1(container)
        with container.stream("ROMEO:", max_new_tokens=LONG_ANSWER, ignore_eos=True) as lines:
            next(lines)
            os.kill(lost.pid, signal.SIGKILL)
            *_, last = lines
        assert last["details"]["finish_reason"] == "error"
        wait_until(lambda: not lost.is_running())
        wait_until(lambda: is_ready(container), START_S)
        assert rank_1(container).pid != lost.pid
        assert container.invoke("ROMEO:", max_new_tokens=8)["generated_text"] == expected
        assert container.stop() == 0
