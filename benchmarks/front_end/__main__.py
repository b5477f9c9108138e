"""Measure the front end alone: its CPU time for each token and each request.

gunicorn and its workers run as they serve. The engine is fake and answers at a given pace, so that
nothing waits for a model, and the clients are raw sockets. docs/benchmarks.md explains the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles

import msgspec

from benchmarks.cpu.http_server import ROOT, MeasurementError
from benchmarks.cpu.machine import heading
from benchmarks.front_end.cases import APIS, Case, cases
from benchmarks.front_end.client import Load, load
from benchmarks.front_end.sampler import PARTS, shares
from benchmarks.front_end.server import Workers, front_end
from core.configuration.options import make_options

FLOOD = 100_000
TOP = 25
"""Functions with the most samples that the results keep."""
HEAD = (
    "| case | tokens/s | µs a token | tokens/s a core | tokens a chunk | µs a request "
    "| /ping p50, p99, ms | client, cores |"
)


class Row(msgspec.Struct, kw_only=True):
    """The figures of a case. CPU time is that of all workers."""

    name: str
    tokens_per_s: float
    token_us: float
    """CPU time for each token but the first of an answer."""
    request_us: float
    """CPU time for a request and its first token."""
    tokens_per_chunk: float | None
    """How many tokens came in one chunk of a stream, on average."""
    ping_p50_ms: float
    ping_p99_ms: float
    client_cores: float
    """What the client used of its core: near 1, it is the limit."""
    shares: dict[str, float]
    """Of the workers' time, by part of the work."""
    functions: dict[str, float]
    """The same, of the functions with the most."""

    @property
    def cells(self) -> list[str]:
        """The cells of the table."""
        chunk = "" if self.tokens_per_chunk is None else f"{self.tokens_per_chunk:.1f}"
        return [
            self.name, f"{self.tokens_per_s:,.0f}", f"{self.token_us:.1f}",
            f"{1e6 / self.token_us:,.0f}", chunk, f"{self.request_us:,.0f}",
            f"{self.ping_p50_ms:.1f}, {self.ping_p99_ms:.1f}", f"{self.client_cores:.2f}",
        ]  # fmt: skip


def measure(workers: Workers, case: Case, idle: float) -> Row:
    """Run a case: requests of one token, then of many. Raises MeasurementError.

    idle: cores that the workers use for /ping alone.
    """
    _, request_us, _ = _load(workers, case, case.requests, 1, idle)
    found, whole_us, counts = _load(workers, case, case.connections, case.tokens, idle)
    num_tokens = case.connections * case.tokens
    cuts = quantiles(found.pings_s, n=100) if len(found.pings_s) > 1 else [0.0] * 99
    num_samples = max(1, sum(counts.values()))
    top = sorted(counts.items(), key=lambda item: -item[1])[:TOP]
    return Row(
        name=case.name,
        tokens_per_s=num_tokens / found.seconds,
        token_us=max(0.01, (whole_us - request_us) / (case.tokens - 1)),
        request_us=request_us,
        tokens_per_chunk=num_tokens / max(1, found.num_chunks) if case.is_stream else None,
        ping_p50_ms=cuts[49] * 1e3,
        ping_p99_ms=cuts[98] * 1e3,
        client_cores=found.client_cpu_s / found.seconds,
        shares=shares(counts),
        functions={_short(function): count / num_samples for function, count in top},
    )


def _load(
    workers: Workers, case: Case, requests: int, tokens: int, idle: float
) -> tuple[Load, float, Mapping[str, int]]:
    """Return what the clients saw, the workers' CPU µs for each request, and their samples."""
    workers.samples()
    before = workers.cpu_s()
    request = case.request(tokens)
    found = load(workers.port, request, connections=case.connections, requests=requests)
    spent_s = workers.cpu_s() - before - idle * found.seconds
    return found, max(0.0, spent_s) / requests * 1e6, workers.samples()


def _idle_cores(workers: Workers, seconds: float) -> float:
    """Return how many cores the workers use while they are only asked for /ping."""
    before = workers.cpu_s()
    found = load(workers.port, b"", connections=0, requests=0, seconds=seconds)
    return (workers.cpu_s() - before) / found.seconds


def _short(function: str) -> str:
    """Return the function with the last two parts of its file's path."""
    file, _, name = function.partition(":")
    return f"{'/'.join(Path(file).parts[-2:])}:{name}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    chosen = cases(
        options.apis,
        options.connections,
        rate=options.rate,
        flood=options.flood,
        seconds=options.seconds,
        requests=options.requests,
    )
    settings = make_options({"http_workers": options.workers, "stream_delay": options.stream_delay})
    rows: list[Row] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="ls-") as folder,
            front_end(options.model, Path(folder), settings) as workers,
        ):
            idle = _idle_cores(workers, options.seconds / 2)
            for case in chosen:
                print(case.name, file=sys.stderr)
                rows.append(measure(workers, case, idle))
    except MeasurementError as error:
        print(f"benchmarks.front_end: {error}", file=sys.stderr)
        return 1
    found = {
        **heading("benchmarks.front_end", arguments or sys.argv[1:]),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(*table(rows), f"{found['machine']}; {found['date']}", sep="\n")
    return 0


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of two tables: the figures, and where the workers' time goes."""
    parts = [*PARTS, "other"]
    lines = [HEAD, "| --- " * HEAD.count(" | ") + "| --- |"]
    lines += [f"| {' | '.join(row.cells)} |" for row in rows]
    lines += ["", f"| share of the time | {' | '.join(parts)} |"]
    lines += ["| --- " * (len(parts) + 1) + "|"]
    for row in rows:
        cells = [f"{row.shares[part]:.0%}" for part in parts]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_end", description=__doc__)
    parser.add_argument(
        "--apis", type=_apis, default=[*APIS], help=f"any of {','.join(APIS)} (default: all)"
    )
    parser.add_argument(
        "--connections",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 100, 1000],
        metavar="N,...",
        help="connections, each with one request at a time (default: 1,100,1000)",
    )
    parser.add_argument(
        "--rate",
        type=int,
        default=5000,
        help="tokens/s of the engine, of all requests together (default: %(default)s)",
    )
    parser.add_argument(
        "--flood",
        type=int,
        default=FLOOD,
        help="a rate beyond what the front end can send, for most connections (default: "
        "%(default)s; 0: leave it out)",
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="time of each case (default: %(default)s)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=200,
        help="requests of one token, to measure a request (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes of the front end (default: %(default)s)"
    )
    parser.add_argument(
        "--stream-delay",
        type=int,
        default=0,
        metavar="MS",
        help="option.stream_delay (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "models" / "demo",
        help="directory with the tokenizer (default: the demo model)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "front-end.json",
        help="file of the results (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def _apis(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in APIS:
            raise argparse.ArgumentTypeError(f"unknown API {name}; choose from {', '.join(APIS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
