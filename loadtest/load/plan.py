"""Plans the requests of a run, identical for every server under test."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loadtest.load.arrivals import bursts, poisson
from loadtest.load.request import Request, Shape, Words
from loadtest.load.traces import Arrival, read_trace
from loadtest.load.workloads import Workload

MAX_DRAWS = 100
"""Shapes to draw for each planned request before giving up on finding shapes that fit."""
EACH_SENDS = ", each sending its next request after a response"
"""Part of the description of a closed loop. Captions leave it out."""
MARGIN = 4
"""Tokens that a prompt may have beyond the plan's: special tokens, or one more for the first word,
which has no space before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load settings that do not come from the workload."""

    num_requests: int
    seconds: float | None = None
    """No request is sent after this time, even if fewer than `num_requests` were sent."""
    users: int
    """Concurrent users of a closed loop."""
    rate: float | None = None
    """Requests per second; turns a closed loop into an open one."""
    trace: Path | None = None
    time_scale: float = 1.0
    """Factor by which the arrivals of a trace, or a workload's own rate, are sped up."""
    length_scale: float = 1.0
    max_length: int | None = None
    """Maximum tokens of a prompt plus its output; longer requests are skipped."""
    seed: int = 0
    """Seed of lengths, words and arrivals."""
    words_of: str = ""
    """Changes only the words of the prompts, so that a server does not find the prompts of an
    earlier round in its prefix cache."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests in sending order."""

    requests: tuple[Request, ...]
    loop: str
    """Description of the closed or open loop."""
    num_left_out: int
    """Requests of the workload that were skipped as too long for the server."""
    stop_s: float | None = None
    """Closed loop: when users stop sending, in seconds from the start; None: never."""

    @property
    def is_open(self) -> bool:
        return self.requests[0].due_s is not None

    def num_users(self, users: int) -> int:
        """Return the number of users: one per request in an open loop, so no request waits."""
        return len(self.requests) if self.is_open else min(users, len(self.requests))


def make_plan(
    workload: Workload, load: Load, words: Words, *, fixed_output: int | None = None
) -> Plan:
    """Plan the requests of a run, deterministically.

    fixed_output: output length of every request, before scaling, overriding the workload's.
    Raises ValueError if no request fits `load.max_length`.
    """
    fitting: list[Arrival] = []
    num_seen = 0
    for arrival in _candidates(workload, load):
        if len(fitting) == load.num_requests:
            break
        num_seen += 1
        shape = _sized(arrival.shape, load.length_scale, fixed_output)
        if (
            load.max_length is None
            or shape.prompt_tokens + shape.output_tokens + MARGIN <= load.max_length
        ):
            fitting.append(Arrival(arrival.at_s, shape))
    if not fitting:
        raise ValueError(
            f"no request of workload {workload.name} fits into {load.max_length} tokens; "
            "use a smaller --length-scale"
        )
    times, loop = _times(workload, load, fitting)
    if load.seconds is not None:
        loop += f", for {load.seconds:g} s"
    requests = tuple(
        Request(
            index,
            arrival.shape,
            _prompt(arrival.shape, index, f"{load.seed}{load.words_of}", words),
            due_s,
            index,
        )
        for index, (arrival, due_s) in enumerate(zip(fitting, times, strict=True))
        if index == 0 or due_s is None or load.seconds is None or due_s <= load.seconds
    )
    stop_s = load.seconds if times[0] is None else None
    return Plan(requests, loop, num_seen - len(fitting), stop_s)


def most_sequences(workload: Workload, load: Load) -> int | None:
    """Return how many sequences a closed loop sends at once; None for an open loop."""
    if not _is_closed(workload, load):
        return None
    # All shapes of a workload have the same number of samples and of beams.
    shape = next(workload.draw(random.Random(load.seed)))
    return load.users * shape.samples * shape.beams


def warm_up_requests(
    plan: Plan, words: Words, count: int, output_tokens: int = 4
) -> tuple[Request, ...]:
    """Return requests with prompts as long as the plan's, but different words and short outputs."""
    rng = random.Random("warm up")
    return tuple(
        Request(
            request.index,
            Shape(
                request.shape.prompt_tokens,
                output_tokens,
                samples=request.shape.samples,
                beams=request.shape.beams,
            ),
            words.text(request.shape.prompt_tokens, rng),
            None,
            request.seed,
        )
        for request in plan.requests[:count]
    )


def _candidates(workload: Workload, load: Load) -> Iterator[Arrival]:
    if load.trace is not None:
        yield from read_trace(load.trace)
        return
    shapes = workload.draw(random.Random(f"{workload.name} {load.seed}"))
    for shape in islice(shapes, MAX_DRAWS * load.num_requests):
        yield Arrival(0.0, shape)


def _sized(shape: Shape, scale: float, fixed_output: int | None) -> Shape:
    if fixed_output is not None:
        shape = Shape(shape.prompt_tokens, fixed_output, shape.prefix, shape.kind)
    return shape.scaled(scale)


def _is_closed(workload: Workload, load: Load) -> bool:
    return workload.loop == "closed" and load.rate is None and load.trace is None


def _times(
    workload: Workload, load: Load, arrivals: Sequence[Arrival]
) -> tuple[list[float | None], str]:
    """Return the due time of each request, and a description of the loop."""
    if load.trace is not None:
        start, span = arrivals[0].at_s, arrivals[-1].at_s - arrivals[0].at_s
        scale = load.rate * span / len(arrivals) if load.rate and span else load.time_scale
        times = [(arrival.at_s - start) / scale for arrival in arrivals]
        return list(times), f"open loop: arrivals of {load.trace.name}, sped up {scale:.3g}×"
    if _is_closed(workload, load):
        loop = f"closed loop: {load.users} users{EACH_SENDS}"
        return [None] * len(arrivals), loop
    rate = load.rate or workload.rate * load.time_scale
    process, name = poisson, "Poisson arrivals"
    if workload.loop == "bursts":
        process, name = bursts, "Poisson arrivals with bursts"
    drawn = process(rate, random.Random(f"arrivals {load.seed}"))
    return list(islice(drawn, len(arrivals))), f"open loop: {name}, {rate:.3g} requests/s"


def _prompt(shape: Shape, index: int, seed: str, words: Words) -> str:
    rng = random.Random(f"{seed} {index}")
    if shape.prefix is None:
        return words.text(shape.prompt_tokens, rng)
    prefix_index, prefix_tokens = shape.prefix
    prefix = words.text(prefix_tokens, random.Random(f"prefix {seed} {prefix_index}"))
    return f"{prefix} {words.text(max(1, shape.prompt_tokens - prefix_tokens), rng)}"
