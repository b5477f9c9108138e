"""`soak`: mixes ordinary, impatient and hostile clients with kills, then checks the server."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from loadtest.servers.clients.transport import HttpTransport, SendError
from loadtest.servers.server import Server
from tests.harm.findings import Findings, Usage, count_ends, grown
from tests.harm.neighbours import TIMEOUT_S, Neighbour, connect, ping, stop_all, stream
from tests.harm.roles import Role, by_role
from tests.harm.rows import ROWS, send

QUICK = ("grammar, chain", "schema, chain of 1,200", "chunk size", "TLS", "never sent")
"""Beginnings or ends of the names of the rows to send. A client can repeat these rows quickly."""
GARBAGE_S = 3.0
"""A client that sends garbage leaves after this time."""
UP_S = 4.0
"""Mean time between the recovery from a kill and the next kill."""
NOTICE_S = 2.0
"""Shortest wait after a kill. Until the server notices the dead process, /ping may answer 200."""
SETTLE_S = 60.0
"""Time for the server to become idle after the clients have left."""
RESTARTED: Sequence[Role] = ("engine", "helper", "worker")
"""Roles whose processes are restarted when they die."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "longshore:kv_blocks_held")
"""Metrics that are 0 when nothing runs."""


class Soak:
    """Runs clients against a server that is started for the soak."""

    def __init__(self, server: Server, *, seed: int) -> None:
        self._server = server
        self._url = server.url
        self._random = random.Random(seed)
        self._kills: Counter[str] = Counter()
        """Number of kills, by role."""
        self._outages: list[tuple[float, float]] = []
        """From each kill until /ping was 200 again, in times of `time.perf_counter`."""
        self._garbage = [
            row.make() for row in ROWS if row.name.startswith(QUICK) or row.name.endswith(QUICK)
        ]

    def run(self, seconds: float) -> Findings:
        """Soak for a quarter of the time without kills, then with them; return the result."""
        broken: list[str] = []
        clients = self._clients()
        with tqdm(total=round(seconds), desc="soak", unit="s", disable=None) as bar:
            self._wait(seconds / 4, bar, with_kills=False)
            stop_all(_all(clients))
            broken += self._settle()
            before = self._usage()
            more = self._clients()
            self._wait(seconds * 3 / 4, bar, with_kills=True)
        stop_all(_all(more))
        broken += self._settle()
        after = self._usage()
        ordinary = [*clients["ordinary"], *more["ordinary"]]
        attempts = [attempt for client in ordinary for attempt in client.attempts]
        ends, failures = count_ends(attempts, self._outages)
        broken += [*failures, *grown(before, after)]
        return Findings(
            seconds=seconds,
            requests={
                kind: sum(len(client.attempts) for client in (*clients[kind], *more[kind]))
                for kind in clients
            },
            ends=ends,
            kills=dict(self._kills),
            before=before,
            after=after,
            broken=broken,
        )

    def _clients(self) -> dict[str, list[Neighbour]]:
        """Start the clients, and return them by kind."""

        def start(
            count: int, request: Callable[[str, random.Random], str], interval_s: float = 0.0
        ) -> list[Neighbour]:
            choices = [random.Random(self._random.random()) for _ in range(count)]
            return [Neighbour(partial(request, self._url, rng), interval_s) for rng in choices]

        return {
            "ordinary": start(4, ordinary),
            "leaving": start(2, leaving, 0.2),
            "stalling": start(1, stalling),
            "hostile": start(1, partial(_hostile, self._garbage), 0.2),
        }

    def _wait(self, seconds: float, bar: tqdm, *, with_kills: bool) -> None:
        """Let the clients run. With kills, kill a process some time after each recovery."""
        begin = time.monotonic()
        until = begin + seconds
        next_kill = begin + UP_S if with_kills else until
        while (now := time.monotonic()) < until:
            if now >= next_kill:
                self._kill()
                next_kill = time.monotonic() + self._random.uniform(0.5, 1.5) * UP_S
            time.sleep(0.25)
            bar.update(max(0, round(time.monotonic() - begin) - round(now - begin)))

    def _kill(self) -> None:
        """Kill a process that the server restarts, and wait until /ping is 200 again."""
        processes = by_role(self._server.processes())
        alive: list[Role] = [role for role in RESTARTED if processes[role]]
        role = self._random.choice(alive)
        victim = self._random.choice(processes[role])
        begin = time.perf_counter()
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
            self._kills[role] += 1
        time.sleep(NOTICE_S)
        pids = {process.pid for process in processes[role]}
        while not self._has_noticed(role, pids) and time.perf_counter() < begin + SETTLE_S:
            time.sleep(0.1)
        while ping(self._url) and time.perf_counter() < begin + SETTLE_S:
            time.sleep(0.1)
        self._outages.append((begin, time.perf_counter()))

    def _has_noticed(self, role: Role, pids: set[int]) -> bool:
        """Whether the server has noticed a death: a new process runs, or /ping fails."""
        if role == "helper":
            return True  # the next request that needs a helper starts one
        now = {process.pid for process in by_role(self._server.processes())[role]}
        return bool(now - pids) or bool(ping(self._url))

    def _settle(self) -> list[str]:
        """Wait until nothing runs. Return what still runs after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            failure = ping(self._url) or self._busy()
            if not failure:
                return []
            if time.monotonic() > deadline:
                return [f"after {SETTLE_S:g} s without clients: {failure}"]
            time.sleep(0.5)

    def _busy(self) -> str:
        transport = HttpTransport(self._url, TIMEOUT_S)
        try:
            text = transport.get("/metrics").decode()
        except SendError as error:
            return str(error)
        finally:
            transport.close()
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in IDLE
        }
        if values.keys() != set(IDLE):
            return f"/metrics lacks {', '.join(set(IDLE) - values.keys())}"
        return ", ".join(f"{name} is {value:g}" for name, value in values.items() if value)

    def _usage(self) -> dict[str, Usage]:
        """Return what each role uses, except helpers, which are started when needed."""
        usage: dict[str, Usage] = {}
        for role, processes in by_role(self._server.processes()).items():
            if role == "helper" or not processes:
                continue
            usage[role] = Usage(
                len(processes),
                sum(process.memory_info().rss for process in processes),
                sum(process.num_threads() for process in processes),
                sum(process.num_fds() for process in processes),
            )
        return usage


def ordinary(url: str, chosen: random.Random) -> str:
    """Ask for an answer, sometimes by a grammar, and read all of it."""
    fields: dict[str, object] = {
        "max_tokens": chosen.randrange(1, 48),
        "seed": chosen.randrange(99),
    }
    match chosen.randrange(4):
        case 0:
            fields |= {"guided_json": SCHEMA, "max_tokens": 40, "ignore_eos": False}
        case 1:
            fields |= {"guided_choice": ["yes", "no"], "ignore_eos": False}
        case _:
            pass
    return stream(url, **fields)


def leaving(url: str, chosen: random.Random) -> str:
    """Leave in the middle of an answer, sometimes before its first byte."""
    return _read_some(url, chosen, num_reads=chosen.randrange(4), pause_s=0.0)


def stalling(url: str, chosen: random.Random) -> str:
    """Read one record a second for some time, then leave."""
    return _read_some(url, chosen, num_reads=chosen.randrange(2, 6), pause_s=1.0)


def _read_some(url: str, chosen: random.Random, *, num_reads: int, pause_s: float) -> str:
    body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True, "stream": True}
    connection = connect(url, GARBAGE_S + TIMEOUT_S)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        if num_reads:
            response = connection.getresponse()
            for _ in range(num_reads):
                response.readline()
                time.sleep(pause_s)
        else:
            time.sleep(chosen.uniform(0.0, 0.2))
    finally:
        connection.close()
    return ""


def _hostile(garbage: list[bytes], url: str, chosen: random.Random) -> str:
    send(url, chosen.choice(garbage), GARBAGE_S)
    return ""


def _all(clients: dict[str, list[Neighbour]]) -> list[Neighbour]:
    return [client for group in clients.values() for client in group]
