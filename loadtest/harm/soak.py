"""`soak`: ordinary, impatient and hostile clients at random beside kills, and what is left then."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from loadtest.clients.transport import HttpTransport, SendError
from loadtest.harm.neighbours import TIMEOUT_S, Neighbour, connect, ping, stream
from loadtest.harm.rows import ROWS, send
from loadtest.roles import Role, by_role
from loadtest.server import Server

QUICK = ("grammar, chain", "schema, chain of 1,200", "chunk size", "TLS", "never sent")
"""Rows that are sent here, by the begin or end of their names: those that a client can repeat."""
GARBAGE_S = 3.0
"""A garbage client leaves after this long."""
UP_S = 4.0
"""Mean time for which the server is well between two kills."""
NOTICE_S = 2.0
"""Time in which the server notices that a process has died; /ping may answer 200 until then."""
SETTLE_S = 60.0
"""Time for everything to be as before, after the clients have left."""
MORTAL: Sequence[Role] = ("engine", "helper", "worker")
"""Roles that are restarted when they die."""
MAX_GROWTH = 0.25
MAX_GROWTH_BYTES = 48 * 2**20
"""A process may have grown by this share and this much, since the quiet part at the start."""
MAX_MORE_FILES = 8
MAX_MORE_THREADS = 4
"""Connections that the kernel still holds, and threads of pools that had not started all."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "longshore:kv_blocks_held")
"""Metrics that are 0 when nothing runs."""


class Usage(msgspec.Struct, frozen=True):
    """What the processes of one role have together."""

    processes: int
    rss_bytes: int
    threads: int
    files: int


class Findings(msgspec.Struct, kw_only=True):
    """The end of a soak."""

    seconds: float
    requests: dict[str, int]
    """Requests by kind of client."""
    ends: dict[str, int]
    """How the requests of ordinary clients ended: whole, or failed in the outage after a kill."""
    kills: dict[str, int]
    """By role."""
    before: dict[str, Usage]
    """By role, after a quiet part without kills."""
    after: dict[str, Usage]
    broken: list[str]

    def text(self) -> str:
        """Return the findings as lines for people."""
        lines = [
            f"{self.seconds:.0f} s; requests: {_listed(self.requests)}",
            f"ordinary requests: {_listed(self.ends)}; kills: {_listed(self.kills)}",
        ]
        for role, usage in self.after.items():
            lines.append(f"{role}: {_usage(self.before.get(role))} -> {_usage(usage)}")
        return "\n".join([*lines, *(f"BROKEN: {what}" for what in self.broken)])


class Soak:
    """Clients of a server that is started for it."""

    def __init__(self, server: Server, *, seed: int) -> None:
        self._server = server
        self._url = server.url
        self._random = random.Random(seed)
        self._kills: Counter[str] = Counter()
        """By role."""
        self._outages: list[tuple[float, float]] = []
        """From each kill until the server was well again, in times of `time.perf_counter`."""
        self._garbage = [
            row.make() for row in ROWS if row.name.startswith(QUICK) or row.name.endswith(QUICK)
        ]

    def run(self, seconds: float) -> Findings:
        """Soak for a quarter of the time without kills, then with them; return what is left."""
        broken: list[str] = []
        clients = self._clients()
        with tqdm(total=round(seconds), desc="soak", unit="s") as bar:
            self._wait(seconds / 4, bar, with_kills=False)
            for neighbour in _all(clients):
                neighbour.stop()
            broken += self._settle()
            before = self._usage()
            more = self._clients()
            self._wait(seconds * 3 / 4, bar, with_kills=True)
        for neighbour in _all(more):
            neighbour.stop()
        broken += self._settle()
        after = self._usage()
        ends = self._ends([*clients["ordinary"], *more["ordinary"]], broken)
        broken += _grown(before, after)
        return Findings(
            seconds=seconds,
            requests={
                kind: sum(len(one.attempts) for one in (*clients[kind], *more[kind]))
                for kind in clients
            },
            ends=ends,
            kills=dict(self._kills),
            before=before,
            after=after,
            broken=broken,
        )

    def _clients(self) -> dict[str, list[Neighbour]]:
        """Start the clients, by kind."""

        def some(
            count: int, request: Callable[[str, random.Random], str], interval_s: float = 0.0
        ) -> list[Neighbour]:
            choices = [random.Random(self._random.random()) for _ in range(count)]
            return [Neighbour(partial(request, self._url, one), interval_s) for one in choices]

        return {
            "ordinary": some(4, _ordinary),
            "leaving": some(2, _leaving, 0.2),
            "stalling": some(1, _stalling),
            "hostile": some(1, partial(_hostile, self._garbage), 0.2),
        }

    def _wait(self, seconds: float, bar: tqdm, *, with_kills: bool) -> None:
        """Let the clients run, and kill a process whenever the server was well for some time."""
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
        """Kill a process, other than those that nothing restarts, and wait until all is well."""
        processes = by_role(self._server.processes())
        alive: list[Role] = [role for role in MORTAL if processes[role]]
        role = self._random.choice(alive)
        begin = time.perf_counter()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._random.choice(processes[role]).kill()
            self._kills[role] += 1
        time.sleep(NOTICE_S)
        while ping(self._url) and time.perf_counter() < begin + SETTLE_S:
            time.sleep(0.1)
        self._outages.append((begin, time.perf_counter()))

    def _settle(self) -> list[str]:
        """Wait until nothing runs. Return what still does after SETTLE_S."""
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

    def _ends(self, ordinary: list[Neighbour], broken: list[str]) -> dict[str, int]:
        """Count how requests ended. One may fail only within an outage."""
        ends: Counter[str] = Counter()
        for attempt in (attempt for client in ordinary for attempt in client.attempts):
            if not attempt.failure:
                ends["whole"] += 1
            elif any(attempt.begin < up and down < attempt.end for down, up in self._outages):
                ends["failed in an outage"] += 1
            else:
                ends["failed"] += 1
                broken.append(f"a request without a kill: {attempt.failure}")
            if "reasons to finish" in attempt.failure and " 0 ends" not in attempt.failure:
                broken.append(f"not one end: {attempt.failure}")
        return dict(ends)

    def _usage(self) -> dict[str, Usage]:
        """Return what each role uses; helpers come and go as they are needed."""
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


def _ordinary(url: str, chosen: random.Random) -> str:
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


def _leaving(url: str, chosen: random.Random) -> str:
    """Leave in the middle of an answer, at times before its first byte."""
    return _read_some(url, chosen, num_reads=chosen.randrange(4), pause_s=0.0)


def _stalling(url: str, chosen: random.Random) -> str:
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
    return [one for several in clients.values() for one in several]


def _grown(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """Return what is more than it was."""
    broken = []
    for role, was in before.items():
        now = after.get(role)
        if now is None or now.processes != was.processes:
            broken.append(f"{role}: {_usage(was)} -> {_usage(now)}")
            continue
        limit = was.rss_bytes * (1 + MAX_GROWTH) + MAX_GROWTH_BYTES
        if now.rss_bytes > limit:
            broken.append(f"{role}: memory grew from {_usage(was)} to {_usage(now)}")
        if now.files > was.files + MAX_MORE_FILES * was.processes:
            broken.append(f"{role}: open files grew from {_usage(was)} to {_usage(now)}")
        if now.threads > was.threads + MAX_MORE_THREADS * was.processes:
            broken.append(f"{role}: threads grew from {_usage(was)} to {_usage(now)}")
    return broken


def _usage(usage: Usage | None) -> str:
    if usage is None:
        return "none"
    return (
        f"{usage.processes} processes, {usage.rss_bytes / 2**20:.0f} MiB, "
        f"{usage.threads} threads, {usage.files} files"
    )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
