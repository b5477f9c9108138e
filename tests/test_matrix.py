"""Of a test that is marked matrix, a sample of the cases runs, and with --matrix all of them."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import sample

ROOT = Path(__file__).parents[1]
TABLE = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("family", range(5))
@pytest.mark.parametrize("strategy", [0, 1, 2, pytest.param(3, marks=pytest.mark.matrix(cases=0))])
def test_table(family, strategy):
    pass

@pytest.mark.matrix(cases=0)
def test_long():
    pass

def test_another():
    pass
"""


class Case:
    """What the sample reads of a case whose names of parameters are those of `tables`."""

    def __init__(self, tables, *, enough=None, **params):
        matrix = pytest.mark.matrix(cases=enough) if enough else pytest.mark.matrix
        self.nodeid = str(params)
        self.callspec = SimpleNamespace(params=params)
        self._marks = [matrix.mark, *(pytest.mark.parametrize(names, []).mark for names in tables)]

    def iter_markers(self, name):
        return (mark for mark in self._marks if mark.name == name)


def values(cases, *names):
    return {tuple(case.callspec.params[name] for name in names) for case in cases}


def test_a_sample_has_each_row_of_each_table():
    """A parametrized fixture is a table, too."""
    rows = [("a", "get"), ("a", "post"), ("b", "get"), ("c", "get"), ("d", "put")]
    cases = [
        Case([("path", "method"), "mode"], path=path, method=method, mode=mode, fixture=fixture)
        for (path, method), mode, fixture in product(rows, range(3), range(4))
    ]
    kept = sample(cases)
    assert len(kept) == len(rows)
    assert values(kept, "path", "method") == {*rows}
    assert values(kept, "mode") == values(cases, "mode")
    assert values(kept, "fixture") == values(cases, "fixture")
    assert sample(cases[::-1]) == kept[::-1], "it does not depend on the order"


def test_a_table_of_one_dimension_is_whole():
    cases = [Case(["family"], family=family) for family in range(7)]
    assert sample(cases) == cases


def test_a_mark_may_say_how_many_cases_are_enough():
    cases = [Case(["seed"], enough=2, seed=seed) for seed in range(7)]
    assert len(sample(cases)) == 2


@pytest.mark.parametrize(
    ("options", "passed", "line"),
    [
        ((), 6, "matrix: 5 of 21 cases; make matrix runs all"),
        (("--numprocesses=1",), 6, "matrix: 5 of 21 cases; make matrix runs all"),
        (("--matrix", "-m", "matrix"), 21, "matrix: 21 of 21 cases"),
        (("-k", "test_table and 0-3"), 1, "matrix: 1 of 1 cases"),
        (("-k", "test_table and 3-4"), 1, "matrix: 1 of 1 cases"),
        (("-k", "test_long"), 1, "matrix: 1 of 1 cases"),
    ],
)
def test_a_run_says_what_it_covers(tmp_path, options, passed, line):
    """A case that is named runs, even if it is not in the sample, or only in `make matrix`."""
    found = run(tmp_path, *options, tmp_path)
    assert line in found.splitlines()
    assert f"{passed} passed" in found


def test_a_named_file_is_not_left_to_the_matrix(tmp_path):
    assert "12 passed" in run(tmp_path, tmp_path / "test_table.py")


def run(folder, *arguments):
    """Return the output of pytest with our settings, in a folder with TABLE."""
    (folder / "test_table.py").write_text(TABLE)
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "tests.conftest"]
    command = [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout
