"""`python -m tests.harm`: harm, soak, kills and recorded.

`harm` measures what hostile requests cost other clients. `soak` checks what hostile clients and
kills leave behind. `kills` kills a container's processes under load. `recorded` checks what
recordings of good traffic say.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from loadtest.servers.server import Server, ServerError, given_properties, read_properties
from tests.harm.arguments import make_parser
from tests.harm.harm import Bounds, Harm, measure_all, table
from tests.harm.kills import report_lines, run_kills
from tests.harm.recorded import find_all, lines_of, record_all
from tests.harm.rows import ROWS
from tests.harm.soak import Soak

EXIT_BROKEN = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    parser = make_parser("python -m tests.harm")
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # must stop the server too
    try:
        return COMMANDS[parsed.command](parser, parsed)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ServerError, TimeoutError, ValueError) as error:
        print(f"harm: {error}", file=sys.stderr)
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


def _kills(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    del parser
    parsed.out.mkdir(parents=True, exist_ok=True)
    properties = read_properties(parsed.properties) if parsed.properties else {}
    kills = run_kills(
        parsed.times, properties, model_dir=parsed.model_dir, seed=parsed.seed, folder=parsed.out
    )
    print(*report_lines(kills), sep="\n")
    return 0


def _recorded(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    if not parsed.only_check:
        record_all(
            parsed.out,
            _properties(parser, parsed),
            seconds=parsed.seconds,
            seed=parsed.seed,
            interval_s=parsed.interval,
        )
    found = find_all(parsed.out, parsed.waits)
    print(*lines_of(found), sep="\n")
    return EXIT_BROKEN if any(each.difference for each in found.values()) else 0


COMMANDS = {"harm": _harm, "soak": _soak, "kills": _kills, "recorded": _recorded}


@contextmanager
def _server(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, changes: Mapping[str, str]
) -> Iterator[tuple[str, Server | None]]:
    """Yield the address of a server, and the server itself if it is started here."""
    url = getattr(parsed, "url", None)
    if url is not None:
        yield url, None
        return
    properties = {**_properties(parser, parsed), **changes}
    parsed.log.parent.mkdir(parents=True, exist_ok=True)
    with Server(properties, parsed.log) as server:
        yield server.url, server


def _properties(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> dict[str, str]:
    try:
        return given_properties(parsed.properties)
    except ValueError as error:
        parser.error(str(error))


def _write(path: Path | None, results: object) -> None:
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
        print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
