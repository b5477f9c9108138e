"""Measure the front end alone: its CPU time for each token and each request.

gunicorn and its workers run as they serve. The engine is fake and answers at a given pace, so that
nothing waits for a model, and the clients are raw sockets. With `--vs vllm`, each case is run by
vLLM's own server too, whose executor is fake. docs/benchmarks.md explains the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles

import msgspec

from benchmarks.cpu.http_server import ROOT, MeasurementError
from benchmarks.cpu.machine import heading
from benchmarks.cpu.peer_python import names_out_of, python_of, versions
from benchmarks.front_end.cases import APIS, Case, cases
from benchmarks.front_end.client import Load, load
from benchmarks.front_end.sampler import PARTS, shares
from benchmarks.front_end.server import Workers, front_end
from benchmarks.front_end.vllm_server import APIS as VLLM_APIS
from benchmarks.front_end.vllm_server import vllm_server
from core.configuration.options import make_options

VLLM = "vllm"
FLOOD = 100_000
WARM_UP = 3
"""Requests before a case, since the first ones load code."""
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
    load(workers.port, case.request(2), connections=1, requests=WARM_UP)
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
    python = python_of(VLLM, options.peer_python, ROOT / "build" / "peers") if options.vs else None
    try:
        with ExitStack() as stack:
            rows = [*_rows(chosen, _systems(stack, options, python), options.seconds / 2)]
    except MeasurementError as error:
        print(f"benchmarks.front_end: {error}", file=sys.stderr)
        return 1
    found = {
        **heading("benchmarks.front_end", arguments or sys.argv[1:]),
        **({"versions": versions(python)} if python else {}),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(*table(rows), f"{found['machine']}; {found['date']}", sep="\n")
    return 0


def _systems(
    stack: ExitStack, options: argparse.Namespace, python: Path | None
) -> dict[str, Workers]:
    """Start our front end, and vLLM's if its interpreter is given. Return them by name."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ls-")))
    settings = make_options({"http_workers": options.workers, "stream_delay": options.stream_delay})
    systems = {"": stack.enter_context(front_end(options.model, folder, settings))}
    if python:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        log = options.out.with_suffix(".vllm.log")
        server = vllm_server(python, options.model, max(options.connections), log)
        systems[VLLM] = stack.enter_context(server)
    return systems


def _rows(chosen: Iterator[Case], systems: Mapping[str, Workers], idle_s: float) -> Iterator[Row]:
    """Measure each case with all systems that have its API, in turns."""
    idle = {name: _idle_cores(workers, idle_s) for name, workers in systems.items()}
    for case in chosen:
        for name, workers in systems.items():
            if name == VLLM and case.api not in VLLM_APIS:
                continue
            print(name, case.name, file=sys.stderr)
            row = measure(workers, case, idle[name])
            row.name = f"{name}: {row.name}" if name else row.name
            yield row


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of two tables: the figures, and where the workers' time goes."""
    parts = [*PARTS, "other"]
    lines = [HEAD, "| --- " * HEAD.count(" | ") + "| --- |"]
    lines += [f"| {' | '.join(row.cells)} |" for row in rows]
    lines += ["", f"| share of the time | {' | '.join(parts)} |"]
    lines += ["| --- " * (len(parts) + 1) + "|"]
    for row in rows:
        if not row.functions:  # vLLM takes no samples
            continue
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
        "--vs",
        type=names_out_of([VLLM]),
        metavar=VLLM,
        help="also measure vLLM's server, in the same run (default: do not)",
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        help="Python interpreter of an environment with vLLM (default: create one)",
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
