"""The commands `harm` and `soak`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from loadtest.harm.harm import Bounds, Harm, measure_all, table
from loadtest.harm.rows import ROWS
from loadtest.harm.soak import Soak
from loadtest.server import Server, ServerError, given_properties

EXIT_BROKEN = 1
EXIT_INTERRUPTED = 130


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # must stop the server too
    try:
        return _harm(parser, parsed) if parsed.command == "harm" else _soak(parser, parsed)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ServerError, ValueError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_BROKEN


def _harm(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    rows = [row for row in ROWS if any(word in row.name for word in parsed.rows)]
    if not rows:
        parser.error(f"no row has one of these words: {', '.join(parsed.rows)}")
    bounds = Bounds(ping_s=parsed.max_ping / 1000, row_s=parsed.max_row)
    with _server(parser, parsed, {}) as (url, server):
        processes = None if server is None else server.processes
        harm = Harm(url, bounds, num_streams=parsed.streams, processes=processes)
        try:
            outcomes = measure_all(harm, rows)
        finally:
            harm.stop()
    print(table(outcomes))
    _write(parsed.json, outcomes)
    return EXIT_BROKEN if any(outcome.broken for outcome in outcomes) else 0


def _soak(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    restarts = {"retry_threshold": "1000000"}
    with _server(parser, parsed, restarts) as (_, server):
        assert server is not None
        findings = Soak(server, seed=parsed.seed).run(parsed.seconds)
    print(findings.text())
    _write(parsed.json, findings)
    return EXIT_BROKEN if findings.broken else 0


@contextmanager
def _server(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, changes: Mapping[str, str]
) -> Iterator[tuple[str, Server | None]]:
    """Yield the address of a server, and the server itself if it is started here."""
    url = getattr(parsed, "url", None)
    if url is not None:
        yield url, None
        return
    try:
        properties = {**given_properties(parsed.properties), **changes}
    except ValueError as error:
        parser.error(str(error))
    parsed.log.parent.mkdir(parents=True, exist_ok=True)
    with Server(properties, parsed.log) as server:
        yield server.url, server


def _write(path: Path | None, results: object) -> None:
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
        print(f"wrote {path}")
