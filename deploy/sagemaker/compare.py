"""Compare strategies on real endpoints: create, load-test and remove one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.aws import Aws

_INTERRUPTED = 130
_LOADTEST = __name__.replace("deploy.sagemaker.compare", "loadtest")
"""`longshore.loadtest` if this is an installed wheel."""


def compare(
    aws: Aws,
    name: str,
    strategies: Sequence[str],
    *,
    bring_up: Callable[[str, str], None],
    load_test: LoadTest,
    take_down: Callable[[str], None],
    out: Path,
) -> None:
    """Load-test the endpoints `name`-STRATEGY into `out`/STRATEGY, then report and print a table.

    Endpoints run one at a time, so a quota of one instance is enough. Each endpoint is removed even
    after an error or an interrupt, and the table has whatever was measured before.
    """
    try:
        for strategy in strategies:
            endpoint = f"{name}-{strategy}"
            try:
                bring_up(endpoint, strategy)
                load_test.measure(endpoint, out / strategy)
            finally:
                take_down(endpoint)
    finally:
        measured = [name for name in strategies if (out / name / "results.json").is_file()]
        if measured:
            load_test.report([out / strategy for strategy in measured], out)
            for line in table_lines({name: _read_measures(out / name) for name in measured}):
                aws.say(line)


class LoadTest:
    """Runs the load test in a process of its own."""

    def __init__(self, aws: Aws, arguments: Sequence[str]) -> None:
        self._aws = aws
        self._arguments = arguments

    def measure(self, endpoint: str, out: Path) -> None:
        """Load-test an endpoint into `out`/results.json. Raises DeployError if that fails."""
        arguments = ["compare", "--sagemaker", endpoint, "--out", str(out)]
        self._run([*arguments, *self._arguments], f"load test of {endpoint}")

    def report(self, folders: Sequence[Path], out: Path) -> None:
        """Write one report of several load tests."""
        self._run(["report", *map(str, folders), "--out", str(out)], "load test report")

    def _run(self, arguments: Sequence[str], purpose: str) -> None:
        command = ["-m", _LOADTEST, *arguments]
        if self._aws.is_dry_run:
            print("python", *command)
            return
        environment = {**os.environ, "AWS_DEFAULT_REGION": self._aws.region}
        code = subprocess.run([sys.executable, *command], env=environment, check=False).returncode
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise DeployError(f"{purpose} failed with exit code {code}")


def table_lines(measures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield one row per strategy, relative to the first; `measures` are from results.json."""
    yield f"{'strategy':<12}{'req/s':>8}{'':>8}{'tok/s':>9}{'TTFT p50':>11}{'p99':>9}{'errors':>8}"
    first = next(iter(measures.values()))["requests_per_s"]
    for strategy, row in measures.items():
        ratio = f"{row['requests_per_s'] / first:.2f}x" if first else ""
        tokens = row["tokens_per_s"]
        times = row["first_token"] or {}
        p50, p99 = (f"{times[key]:.2f} s" if times else "" for key in ("p50", "p99"))
        yield (
            f"{strategy:<12}{row['requests_per_s']:>8.2f}{ratio:>8}"
            f"{'' if tokens is None else format(tokens, '.0f'):>9}{p50:>11}{p99:>9}"
            f"{row['num_errors']:>8}"
        )


def _read_measures(out: Path) -> dict[str, Any]:
    (run, *_) = json.loads((out / "results.json").read_text("utf-8"))["runs"]
    return run["measures"]
