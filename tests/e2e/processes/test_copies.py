"""Two copies of a model in a container: where requests go, and the loss of one copy."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.container.processes import descendants, wait_until
from tests.e2e.serving import IMAGE, LONG_ANSWER, START_S, long_winded, serve

PROPERTIES = """
option.device=cpu
option.dtype=fp32
option.copies=2
option.http_workers=1
retry_threshold=1
"""
RUNNING = "vllm:num_requests_running"
LONG = "JULIET: Romeo, Romeo, wherefore art thou Romeo? " * 20

pytestmark = pytest.mark.skipif(bool(IMAGE), reason="signals processes of the checkout")


def series(container, name):
    """Return a metric's values by copy number; a value of the whole container has the key None."""
    status, data = container.request("GET", "/metrics")
    assert status == 200
    return {
        sample.labels.get("engine"): sample.value
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
        if sample.name == name
    }


def engine_of(container, copy):
    """Return the process id of a copy's engine."""
    for pid in descendants(container.process.pid):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if arguments[1:3] == [b"-m", b"engine"] and arguments[5] == str(copy).encode():
            return pid
    raise AssertionError(f"copy {copy} has no engine")


def wait_for_both(container):
    wait_until(lambda: series(container, "longshore:copies_serving") == {None: 2}, START_S)


def wait_until_idle(container):
    """Wait until the worker knows that both copies are idle. It then prefers copy 0."""
    wait_until(lambda: series(container, RUNNING) == {"0": 0, "1": 0})


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(240)  # engines start three times
def test_two_copies_share_the_requests_and_one_survives_the_other(tmp_path):
    with serve(tmp_path, PROPERTIES, model=long_winded(tmp_path)) as container:
        wait_for_both(container)
        container.wait_for_log("engine of copy 1 is ready")
        assert "    copy 1: rank 0 on the CPU, " in container.log
        expected = container.invoke("ROMEO:", max_new_tokens=8)["generated_text"]
        wait_until_idle(container)
        with container.stream("ROMEO:", max_new_tokens=LONG_ANSWER, ignore_eos=True) as first:
            next(first)
            container.invoke(LONG, max_new_tokens=4)  # goes to copy 1, which is idle
            wait_until(lambda: series(container, RUNNING) == {"0": 1, "1": 0})
            parameters = {"max_new_tokens": 2000, "ignore_eos": True, "details": True}
            with container.stream("ROMEO:", **parameters) as second:
                next(second)
                os.kill(engine_of(container, 0), signal.SIGKILL)
                *_, lost = first
                assert container.request("GET", "/ping")[0] == 200
                *_, whole = second
        assert lost["details"]["finish_reason"] == "error"
        assert (whole["details"]["finish_reason"], whole["details"]["generated_tokens"]) == (
            "length", 2000,
        )  # fmt: skip
        wait_for_both(container)
        for _ in range(2):
            # goes to copy 1, which has cached the prefix, although the restarted copy 0 is idle
            container.invoke(LONG, max_new_tokens=4)
        wait_until(lambda: series(container, "vllm:prefix_cache_hits_total")["1"] >= 2 * 256)
        assert series(container, "vllm:prompt_tokens_total")["0"] == 0
        wait_until_idle(container)
        with container.stream("ROMEO:", max_new_tokens=LONG_ANSWER, ignore_eos=True) as lines:
            next(lines)
            assert container.invoke("ROMEO:", max_new_tokens=8)["generated_text"] == expected
            wait_until(lambda: series(container, RUNNING)["0"] == 1)
        assert container.stop() == 0
