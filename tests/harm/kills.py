"""`python -m tests.harm kills`: kills a container's processes under load, at random moments.

Each kill is SIGKILL to one process: the engine, a front-end worker or the supervisor. The command
measures how the running requests end and how long that takes. For the engine and workers, it also
measures how long it takes until the container answers again; for the supervisor, with which the
container ends, how many processes and files are left behind.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.servers.clients.transport import HttpTransport, SendError
from loadtest.servers.server import Server
from tests.harm.endings import Clients, Ending, count
from tests.harm.roles import Role, by_role

TARGETS: Sequence[Role] = ("engine", "worker", "supervisor")
PROPERTIES: Mapping[str, str] = {"retry_threshold": "1000", "option.http_workers": "1"}
NUM_STREAMS = 12
NUM_WHOLE = 4
MAX_NEW_TOKENS = 900
MAX_DELAY_S = 1.5
"""A process is killed at most this long after the requests were sent."""
END_S = 60.0
RECOVERY_S = 120.0


@dataclass(frozen=True, slots=True)
class Kill:
    """The effects of one kill."""

    target: str
    killed_at: float
    endings: Sequence[Ending]
    recovery_s: float | None
    """Time until a new request was answered; None for the supervisor, which ends the container."""
    num_processes_left: int = 0
    num_files_left: int = 0

    @property
    def last_end_s(self) -> float:
        """Seconds from the kill until the last request ended."""
        return max(0.0, max(ending.at for ending in self.endings) - self.killed_at)


def run_kills(
    times: int, properties: Mapping[str, str], *, model_dir: Path | None, seed: int, folder: Path
) -> list[Kill]:
    """Kill `times` processes, those of TARGETS in turn. Each container ends with its supervisor.

    Writes the containers' logs to `folder`.
    """
    choices, kills = random.Random(seed), list[Kill]()
    while len(kills) < times:
        log = folder / f"kills-{len(kills)}.log"
        with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
            server = Server(
                {**PROPERTIES, **properties}, log, model_dir=model_dir, temporary=Path(scratch)
            )
            with server:
                for target in TARGETS[: times - len(kills)]:
                    kills.append(_kill(server, target, choices, Path(scratch)))
                    print(_line(kills[-1]), flush=True)
    return kills


def report_lines(kills: Sequence[Kill]) -> list[str]:
    """Return a Markdown table with one row for each kind of process."""
    lines = [
        "| killed | times | answered | error | cut | last request ended after, s (median, max) | "
        "answers again after, s (median, max) | processes left | files left |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for target in TARGETS:
        rows = [kill for kill in kills if kill.target == target]
        if not rows:
            continue
        kinds = count([ending for kill in rows for ending in kill.endings])
        recoveries = [kill.recovery_s for kill in rows if kill.recovery_s is not None]
        cells = [
            target,
            str(len(rows)),
            *(str(kinds[kind]) for kind in ("answered", "error", "cut")),
            _spread([kill.last_end_s for kill in rows]),
            _spread(recoveries) if recoveries else "—",
            str(sum(kill.num_processes_left for kill in rows)),
            str(sum(kill.num_files_left for kill in rows)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _kill(server: Server, target: Role, choices: random.Random, scratch: Path) -> Kill:
    clients = Clients(
        server.port, num_streams=NUM_STREAMS, num_whole=NUM_WHOLE, max_new_tokens=MAX_NEW_TOKENS
    )
    time.sleep(choices.uniform(0.0, MAX_DELAY_S))
    processes = server.processes()
    (victim, *_) = by_role(processes)[target]
    killed_at = time.monotonic()
    victim.kill()
    if target == "supervisor":
        endings = clients.wait(END_S)
        _, alive = psutil.wait_procs(processes, timeout=END_S)
        num_files = sum(path.is_file() or path.is_socket() for path in scratch.rglob("*"))
        return Kill(target, killed_at, endings, None, len(alive), num_files)
    recovery_s = _wait_for_answer(server, killed_at)
    return Kill(target, killed_at, clients.wait(END_S), recovery_s)


def _wait_for_answer(server: Server, killed_at: float) -> float:
    """Return the seconds from the kill until a new request is answered."""
    body = json.dumps({"inputs": "ROMEO:", "parameters": {"max_new_tokens": 1}}).encode()
    transport = HttpTransport(server.url, 5.0)
    try:
        while time.monotonic() < killed_at + RECOVERY_S:
            with suppress(SendError):
                transport.post("/invocations", body)
                return time.monotonic() - killed_at
            time.sleep(0.05)
    finally:
        transport.close()
    raise TimeoutError(f"the container did not answer within {RECOVERY_S:g} s after the kill")


def _line(kill: Kill) -> str:
    kinds = count(kill.endings)
    recovery = "" if kill.recovery_s is None else f" answers_again_s={kill.recovery_s:.1f}"
    return (
        f"killed={kill.target} answered={kinds['answered']} error={kinds['error']} "
        f"cut={kinds['cut']} last_request_ended_s={kill.last_end_s:.1f}{recovery} "
        f"processes_left={kill.num_processes_left} files_left={kill.num_files_left}"
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}"
