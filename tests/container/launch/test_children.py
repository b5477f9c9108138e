"""The environment of child processes."""

from __future__ import annotations

import json
import sys

import pytest

from container.launch.children import OPENMP_SPIN_COUNT, Child
from tests.container.processes import wait_until

SAY = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def seen_by_a_child(tmp_path):
    def start(variables):
        file = tmp_path / "said"
        with file.open("w") as log:
            child = Child("one", [sys.executable, "-c", SAY], variables=variables, output=log)
        wait_until(lambda: child.exit_code is not None)
        assert child.exit_code == 0
        return json.loads(file.read_text())

    return start


def test_openmp_threads_spin_for_a_while_and_then_sleep(seen_by_a_child):
    seen = seen_by_a_child({"MINE": "1"})
    assert (seen["MINE"], seen["GOMP_SPINCOUNT"], seen["OMP_WAIT_POLICY"]) == (
        "1",
        OPENMP_SPIN_COUNT,
        "PASSIVE",
    )


def test_the_users_openmp_settings_are_kept(seen_by_a_child):
    seen = seen_by_a_child({"OMP_WAIT_POLICY": "ACTIVE"})
    assert seen["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in seen, "it would override the policy"
    assert seen_by_a_child({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
