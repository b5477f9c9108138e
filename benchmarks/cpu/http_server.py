"""Measures a server with the load test; nothing else runs on the machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cpu.work import Result, Sent, Work

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0
STOP_S = 30.0
POLL_S = 0.2


class MeasurementError(Exception):
    """A server or command failed, or did not start; the message may end with its last log lines."""


def measure_server(
    command: Sequence[str], environment: Mapping[str, str], ready: str, work: Work, folder: Path
) -> Result:
    """Start a server, load it with many users and then with one, and stop it.

    command: command line, with {port} for the port. ready: path that returns 200 once the server
    is ready. Raises MeasurementError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with running_server(command, environment, ready, folder / "server.log") as url:
        start_s = time.perf_counter() - started
        many = _load(url, folder / "users", work.users, work.requests, work.seed)
        one_user = _load(url, folder / "one-user", 1, work.requests_of_one, work.seed + 1)
    return Result(
        tokens_per_s=many["measures"]["tokens_per_s"],
        tokens_per_s_of_one=one_user["measures"]["tokens_per_s"],
        start_s=start_s,
        sent=[Sent(record["prompt_tokens"], record["asked_tokens"]) for record in many["records"]],
    )


def _load(url: str, folder: Path, users: int, requests: int, seed: int) -> dict:
    """Run the load test and return its only run. Warms up with one request per user, at most 16."""
    command = [sys.executable, "-m", "loadtest", "compare", "--target", url, "--schema", "openai"]
    command += ["--rounds", "1", "--workload", "aws"]
    command += ["--users", str(users), "--requests", str(requests)]
    command += ["--seed", str(seed), "--warm-up", str(min(16, users)), "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise MeasurementError(f"{' '.join(command)} exited with {done.returncode}")
    (run,) = json.loads((folder / "results.json").read_text())["runs"]
    if run["measures"]["num_errors"] or run["measures"]["num_short"]:
        raise MeasurementError(f"{folder}/results.json: requests failed or outputs are incomplete")
    return run


@contextmanager
def running_server(
    command: Sequence[str], environment: Mapping[str, str], ready: str, log: Path
) -> Iterator[str]:
    """Run a server and yield its URL. The arguments are those of `measure_server`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [part.format(port=port) for part in command],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all its processes can be stopped
        )
    try:
        _wait_until_ready(process, url + ready, log)
        yield url
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    lines = log.read_text(errors="replace").splitlines()[-15:]
    raise MeasurementError("\n".join([f"the server did not become ready: {log}", *lines]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server's whole session, because servers start child processes."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
