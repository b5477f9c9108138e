"""`recorded`: good traffic against each strategy, and what its recording must say.

A server for each strategy, side by side, gets the clients of `soak` that are not hostile. Then, of
each recording: a replay does the same; at the end of each step, receipts and what has a name are
the engine's clock; and the causes of the longest waits are the smallest ones that can be removed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
from tqdm import tqdm

from benchmarks.replay.page.rows import Row
from benchmarks.replay.page.tape import Tape
from core.configuration.strategy_table import BATCHING_NAMES
from engine.observers.frames import Arrived, Scheduled
from engine.observers.store import Recording, read_recording
from loadtest.servers.server import Server
from tests.benchmarks.replay.checks import check_causes, check_law
from tests.harm.neighbours import Neighbour, stop_all
from tests.harm.soak import leaving, ordinary, stalling

SCARCE = {
    "option.max_model_len": "192",
    "option.num_kv_blocks": "14",
    "option.kv_reservation": "pow2",
    "option.receipts": "true",
    "batch_size": "8",
    "max_batch_delay": "50",
}
"""So that requests wait, for blocks too."""
CLIENTS = ((ordinary, 10), (leaving, 2), (stalling, 1))


class Found(msgspec.Struct):
    """What a recording says. It raises AssertionError if the law or a cause does not hold."""

    num_requests: int
    num_steps: int
    num_preemptions: int
    seconds: float
    difference: str | None
    """Where the replay is not the same."""
    num_lawful_steps: int
    num_waits: int
    """Requests whose causes were tried."""
    num_causes: int


def record_all(
    folder: Path, properties: Mapping[str, str], *, seconds: float, seed: int, interval_s: float
) -> None:
    """Record good traffic of `seconds` for each strategy, in a folder with its name."""
    rng, urls = random.Random(seed), list[str]()
    with ExitStack() as servers:
        for name in BATCHING_NAMES:
            place = (folder / name).resolve()
            place.mkdir(parents=True, exist_ok=True)
            settings = {**SCARCE, **properties, "option.batching": name}
            settings["option.record"] = str(place)
            urls.append(servers.enter_context(Server(settings, folder / f"{name}.log")).url)
        clients = [
            Neighbour(partial(kind, url, random.Random(rng.random())), interval_s)
            for url in urls
            for kind, count in CLIENTS
            for _ in range(count)
        ]
        with tqdm(total=round(seconds), desc="recorded", unit="s", disable=None) as bar:
            for _ in range(round(seconds)):
                time.sleep(1)
                bar.update()
        stop_all(clients)
    failures = [each.failure for client in clients for each in client.attempts if each.failure]
    assert not failures, failures[0]


def find(recording: Recording, num_waits: int) -> Found:
    """Check a recording. num_waits: of how many of the longest waits the causes are tried."""
    law, difference = check_law(recording)
    tape = Tape(recording)
    longest = sorted(tape.rows.values(), key=_wait, reverse=True)
    requests = list(dict.fromkeys(row.request for row in longest if row.id == row.request))
    causes = [cause for id in requests[:num_waits] for cause in check_causes(tape, id)]
    steps = [frame for frame in recording.frames if isinstance(frame, Scheduled)]
    return Found(
        num_requests=sum(isinstance(frame, Arrived) for frame in recording.frames),
        num_steps=len(steps),
        num_preemptions=steps[-1].num_preemptions,
        seconds=tape.end - tape.begin,
        difference=None if difference is None else str(difference),
        num_lawful_steps=law.num_steps,
        num_waits=len(requests[:num_waits]),
        num_causes=sum(bool(cause.blockers) for cause in causes),
    )


def _wait(row: Row) -> float:
    end = row.end if row.admitted is None else row.admitted
    return (row.arrived if end is None else end) - row.arrived


def find_all(folder: Path, num_waits: int) -> dict[str, Found]:
    """Check the recordings of `record_all`, by strategy."""
    return {name: find(read_recording(folder / name), num_waits) for name in BATCHING_NAMES}


def lines_of(found: Mapping[str, Found]) -> Sequence[str]:
    """Return a Markdown table."""
    lines = [
        "| strategy | requests | in seconds | steps | preemptions | replay | law of receipts | "
        "causes, of the longest waits |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{name}` | {each.num_requests:,} | {each.seconds:.0f} | {each.num_steps:,} "
        f"| {each.num_preemptions:,} | {'the same' if each.difference is None else '**differs**'} "
        f"| in {each.num_lawful_steps:,} steps | {each.num_causes:,}, of {each.num_waits} |"
        for name, each in found.items()
    ]
    return lines
