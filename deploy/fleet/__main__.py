"""The command line: `serve` starts or updates a fleet of containers on Ray, `stop` ends it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from container.configuration.report import report_error
from container.launch.ports import require_free_port
from core.configuration.options import Options
from core.errors import ConfigurationError
from core.process.processes import note_stop_signals
from deploy.fleet.arguments import DEFAULT_PORT, make_parser
from deploy.fleet.properties import read_options

_POLL_INTERVAL_S = 0.1


class _Stopped(BaseException):
    """A stop signal has arrived before the fleet was ready to serve."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m deploy.fleet") -> int:
    """Run a command line and return the exit code. prog: the program's name in its help.

    Raises ModuleNotFoundError if Ray is not installed.
    """
    try:
        parsed = make_parser(prog).parse_args(arguments)
        if parsed.command == "stop":
            return _stop(parsed.address)
        options = read_options(parsed.properties)
        return _serve_locally(parsed, options) if parsed.local_nodes else _serve(parsed, options)
    except ConfigurationError as error:
        return report_error(error)


def _serve(parsed: argparse.Namespace, options: Options) -> int:
    from deploy.fleet.application import fleet_of  # lazy: only now Ray is needed
    from deploy.fleet.deployment import connected, deploy

    with connected(parsed.address):
        deploy(fleet_of(parsed, options), parsed.port)
    print("the fleet serves; `stop` ends it", flush=True)
    return 0


def _serve_locally(parsed: argparse.Namespace, options: Options) -> int:
    # Ray reads this when it is imported. By default, it waits up to 30 s if SIGTERM comes while a
    # node starts.
    os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

    from deploy.fleet.application import fleet_of
    from deploy.fleet.deployment import connected, deploy, end, wait_for_route
    from deploy.fleet.local_cluster import local_cluster

    port = parsed.port or DEFAULT_PORT
    require_free_port(port)
    fleet = fleet_of(parsed, options)
    _raise_at_signals()
    try:
        cpus = fleet.cpus_of_node(parsed.local_nodes)
        with local_cluster(parsed.local_nodes, cpus) as address, connected(address):
            _raise_at_signals()  # Ray has installed handlers of its own
            deploy(fleet, port)
            wait_for_route(port)
            stop_signals = note_stop_signals()
            print(f"the fleet serves on http://localhost:{port}", flush=True)
            while not stop_signals:
                time.sleep(_POLL_INTERVAL_S)
            print(f"stopping; running requests have {parsed.grace:g} s to finish", flush=True)
            end()
    except (_Stopped, SystemExit):  # while Ray starts, its own handlers raise SystemExit
        print("stopped before the fleet could serve", flush=True)
    return 0


def _raise_at_signals() -> None:
    """Have the first SIGINT or SIGTERM raise _Stopped. Later ones must not disturb the clean-up."""

    def stop(*_: object) -> None:
        note_stop_signals()
        raise _Stopped

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)


def _stop(address: str | None) -> int:
    from deploy.fleet.deployment import connected, end

    with connected(address):
        end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
