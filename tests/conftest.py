"""Settings of the test suite, the sample of its wide tables, and a fixture for Unix sockets."""

from __future__ import annotations

import gc
import re
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import chain
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings

collect_ignore = ["browser", "conformance"]
"""Suites with environments of their own: `make page-test` and `make conformance`."""

settings.register_profile("tests", derandomize=True, deadline=None)
settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def empty_folder_of_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure apart from what is measured for users."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core.process.measured.folder", lambda: folder)
        yield


MATRIX_CASES = "matrix cases"
"""A property of one test for each matrix: how many cases run, and how many there are."""
counts: list[tuple[int, int]] = []
"""This property of all tests that have run, also in workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/container/golden anew"
    )
    parser.addoption(
        "--matrix", action="store_true", help="run all cases of tests marked matrix, not a sample"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "matrix(cases): a wide table, of which a sample (of so many cases) runs without --matrix; "
        "cases=0: it runs only with --matrix, or if its file or its name is given",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what no sample has of what -k and -m have chosen.

    Run the longest test first, so that no worker is left with it when the others are done.
    """
    matrices: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") and (hasattr(item, "callspec") or _enough(item) == 0):
            assert isinstance(item, pytest.Function)
            matrices[item.nodeid.partition("[")[0]].append(item)
    runs = {name: _chosen(config, cases) for name, cases in matrices.items()}
    dropped = {case for name, cases in matrices.items() for case in cases if case not in runs[name]}
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]
    for name, cases in matrices.items():
        for teller in (runs[name] or items)[:1]:
            teller.user_properties.append((MATRIX_CASES, (len(runs[name]), len(cases))))
    items.sort(key=lambda item: item.path.name != "test_interpreted.py")


def _chosen(config: pytest.Config, cases: list[pytest.Function]) -> list[pytest.Function]:
    if config.option.matrix:
        return cases
    sampled = [case for case in cases if _enough(case) != 0]
    is_named = config.option.keyword or any(cases[0].path.name in arg for arg in config.args)
    rest = [case for case in cases if _enough(case) == 0] if is_named else []
    return [*(sample(sampled) if sampled else []), *rest]


def _enough(case: pytest.Item) -> int | None:
    """Return how many cases are enough; None if every row of each parametrize is needed."""
    marks = case.iter_markers("matrix")
    return min((mark.kwargs["cases"] for mark in marks if mark.kwargs), default=None)


def sample(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return some of a function's cases, in which each row of each of its parametrize occurs.

    The case with the most new rows is next. Among equals, a hash of the name decides. If the mark
    says how many cases are enough, since the rows are alike, there are no more.
    """
    rows = {case: _rows(case) for case in cases}
    enough = _enough(cases[0]) or len(cases)
    left = set().union(*rows.values())
    kept: set[pytest.Function] = set()
    while left and len(kept) < enough:
        best = min(cases, key=lambda case: (-len(rows[case] & left), crc32(case.nodeid.encode())))
        left -= rows[best]
        kept.add(best)
    return [case for case in cases if case in kept]


def _rows(case: pytest.Function) -> set[Hashable]:
    """Return a case's row of each parametrize, and its parameter of each fixture."""
    marks = case.iter_markers("parametrize")
    tables = [tuple(re.findall(r"\w+", str(mark.args[0]))) for mark in marks]
    params = case.callspec.params
    tables += [(name,) for name in params.keys() - set(chain(*tables))]
    return {(names, *(id(params[name]) for name in names)) for names in tables}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the cases that workers run, too: pytest-xdist passes on their reports."""
    if report.when == "teardown":
        counts.extend(value for name, value in report.user_properties if name == MATRIX_CASES)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much of the matrices this run covers."""
    if counts:
        kept, total = map(sum, zip(*counts, strict=True))
        rest = "" if kept == total else "; make matrix runs all"
        terminalreporter.write_line(f"matrix: {kept:,} of {total:,} cases{rest}")


def pytest_collection_finish() -> None:
    """Freeze the objects of imported modules, so that garbage collections skip torch's objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory for Unix sockets, whose paths must be short; `tmp_path` is too long."""
    with tempfile.TemporaryDirectory(prefix="ls-") as path:
        yield Path(path)
