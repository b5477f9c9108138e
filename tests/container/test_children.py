"""What a child process is given."""

from __future__ import annotations

import json
import sys

import pytest

from container.launch.children import SPINS, Child

SAY = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def seen_by_a_child(tmp_path):
    def start(variables):
        file = tmp_path / "said"
        with file.open("w") as said:
            child = Child("one", [sys.executable, "-c", SAY], variables=variables, output=said)
        assert child._process.wait(10) == 0
        return json.loads(file.read_text())

    return start


def test_threads_spin_for_a_while_and_then_sleep(seen_by_a_child):
    seen = seen_by_a_child({"MINE": "1"})
    assert (seen["MINE"], seen["GOMP_SPINCOUNT"], seen["OMP_WAIT_POLICY"]) == (
        "1",
        SPINS,
        "PASSIVE",
    )


def test_who_says_how_threads_wait_is_heard(seen_by_a_child):
    seen = seen_by_a_child({"OMP_WAIT_POLICY": "ACTIVE"})
    assert seen["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in seen, "it would be what counts"
    assert seen_by_a_child({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
