"""The strategies on real endpoints: one after the other made, load-tested and removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from deploy.aws import Aws
from deploy.errors import DeployError

_INTERRUPTED = 130


class Measuring(Protocol):
    """A load test that writes a results.json into a folder, and a page of several."""

    def measure(self, endpoint: str, out: Path) -> None: ...

    def report(self, folders: Sequence[Path], out: Path) -> None: ...


def compare(
    aws: Aws,
    name: str,
    strategies: Sequence[str],
    *,
    bring_up: Callable[[str, str], None],
    load_test: Measuring,
    take_down: Callable[[str], None],
    out: Path,
) -> None:
    """Measures the endpoints `name`-STRATEGY into `out`/STRATEGY; at the end a report and a table.

    One runs at a time, so that quotas for one instance are enough. Each is removed, whatever
    happens; what was measured before an error is in the table all the same.
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
        measured = [each for each in strategies if (out / each / "results.json").is_file()]
        if measured:
            load_test.report([out / each for each in measured], out)
            for line in table_lines({each: _measures(out / each) for each in measured}):
                aws.say(line)


class LoadTest:
    """python -m loadtest with these arguments, in its own process."""

    def __init__(self, aws: Aws, arguments: Sequence[str]) -> None:
        self._aws = aws
        self._arguments = arguments

    def measure(self, endpoint: str, out: Path) -> None:
        """Writes results.json there. Raises DeployError where it could not."""
        measured = ["compare", "--sagemaker", endpoint, "--out", str(out)]
        self._run([*measured, *self._arguments], f"of {endpoint}")

    def report(self, folders: Sequence[Path], out: Path) -> None:
        """One page of several measurements."""
        self._run(["report", *map(str, folders), "--out", str(out)], "that makes the report")

    def _run(self, arguments: Sequence[str], what: str) -> None:
        command = ["-m", "loadtest", *arguments]
        if self._aws.is_dry_run:
            print("python", *command)
            return
        environment = {**os.environ, "AWS_DEFAULT_REGION": self._aws.region}
        code = subprocess.run([sys.executable, *command], env=environment, check=False).returncode
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise DeployError(f"the load test {what} ended with code {code}")


def table_lines(measures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A row a strategy, compared with the first; measures: of loadtest's results.json."""
    yield f"{'strategy':<12}{'req/s':>8}{'':>8}{'tok/s':>9}{'TTFT p50':>11}{'p99':>9}{'errors':>8}"
    first = next(iter(measures.values()))["requests_per_s"]
    for strategy, each in measures.items():
        ratio = f"{each['requests_per_s'] / first:.2f}x" if first else ""
        tokens = each["tokens_per_s"]
        times = each["first_token"] or {}
        p50, p99 = (f"{times[key]:.2f} s" if times else "" for key in ("p50", "p99"))
        yield (
            f"{strategy:<12}{each['requests_per_s']:>8.2f}{ratio:>8}"
            f"{'' if tokens is None else format(tokens, '.0f'):>9}{p50:>11}{p99:>9}"
            f"{each['num_errors']:>8}"
        )


def _measures(out: Path) -> dict[str, Any]:
    (run, *_) = json.loads((out / "results.json").read_text("utf-8"))["runs"]
    return run["measures"]
