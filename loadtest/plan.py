"""The requests of one measurement: the same for every server that is measured."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loadtest.arrivals import bursts, poisson
from loadtest.ask import Ask, Shape
from loadtest.traces import Arrival, read_trace
from loadtest.words import Words
from loadtest.workloads import Workload

MAX_DRAWS = 100
"""Shapes looked at for each that is wanted, before the limit counts as impossible."""
MARGIN = 4
"""Tokens that a server may add to a prompt: special ones, or for a first word without a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for beside the workload."""

    requests: int
    users: int
    rate: float | None = None
    """Requests per second; turns a closed loop into an open one."""
    trace: Path | None = None
    time_scale: float = 1.0
    """Arrivals of a trace, or of a workload with a rate of its own, come so many times as fast."""
    length_scale: float = 1.0
    max_length: int | None = None
    """Most tokens of a prompt and its answer; what is longer is left out."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Asks in the order in which they are sent."""

    asks: tuple[Ask, ...]
    loop: str
    """Closed or open, in words."""
    num_left_out: int
    """Requests of the workload that are too long for the server."""

    @property
    def is_open(self) -> bool:
        return self.asks[0].due_s is not None

    def num_users(self, users: int) -> int:
        """In an open loop nobody ever waits for another's answer, so each has one request."""
        return len(self.asks) if self.is_open else min(users, len(self.asks))


def make_plan(
    workload: Workload, load: Load, words: Words, *, fixed_answer: int | None = None
) -> Plan:
    """The same for the same arguments. Raises ValueError where nothing fits `load.max_length`.

    fixed_answer: of every request, before scaling, in place of its own length.
    """
    fitting: list[Arrival] = []
    num_seen = 0
    for arrival in _candidates(workload, load):
        if len(fitting) == load.requests:
            break
        num_seen += 1
        shape = _sized(arrival.shape, load.length_scale, fixed_answer)
        if load.max_length is None or shape.prompt + shape.answer + MARGIN <= load.max_length:
            fitting.append(Arrival(arrival.at_s, shape))
    if not fitting:
        raise ValueError(
            f"no request of {workload.name} fits into {load.max_length} tokens; "
            "give a smaller --length-scale"
        )
    times, loop = _times(workload, load, fitting)
    asks = tuple(
        Ask(index, arrival.shape, _prompt(arrival.shape, index, load.seed, words), due_s, index)
        for index, (arrival, due_s) in enumerate(zip(fitting, times, strict=True))
    )
    return Plan(asks, loop, num_seen - len(fitting))


def warm_up_asks(plan: Plan, words: Words, count: int, answer: int = 4) -> tuple[Ask, ...]:
    """Prompts as long as the plan's, with other words, and short answers."""
    rng = random.Random("warm up")
    return tuple(
        Ask(
            ask.index,
            Shape(ask.shape.prompt, answer, None, "", ask.shape.samples, ask.shape.beams),
            words.text(ask.shape.prompt, rng),
            None,
            ask.seed,
        )
        for ask in plan.asks[:count]
    )


def _candidates(workload: Workload, load: Load) -> Iterator[Arrival]:
    if load.trace is not None:
        yield from read_trace(load.trace)
        return
    shapes = workload.draw(random.Random(f"{workload.name} {load.seed}"))
    for shape in islice(shapes, MAX_DRAWS * load.requests):
        yield Arrival(0.0, shape)


def _sized(shape: Shape, scale: float, fixed_answer: int | None) -> Shape:
    if fixed_answer is not None:
        shape = Shape(shape.prompt, fixed_answer, shape.prefix, shape.kind)
    return shape.scaled(scale)


def _times(
    workload: Workload, load: Load, arrivals: Sequence[Arrival]
) -> tuple[list[float | None], str]:
    """When each is due, and the loop in words."""
    if load.trace is not None:
        start, span = arrivals[0].at_s, arrivals[-1].at_s - arrivals[0].at_s
        scale = load.rate * span / len(arrivals) if load.rate and span else load.time_scale
        times = [(each.at_s - start) / scale for each in arrivals]
        return list(times), f"open loop: arrivals of {load.trace.name}, {scale:.3g} times as fast"
    if workload.loop == "closed" and load.rate is None:
        loop = f"closed loop: {load.users} users, each sends its next request after an answer"
        return [None] * len(arrivals), loop
    rate = load.rate or workload.rate * load.time_scale
    process, name = poisson, "Poisson arrivals"
    if workload.loop == "bursts":
        process, name = bursts, "bursts among Poisson arrivals"
    drawn = process(rate, random.Random(f"arrivals {load.seed}"))
    return list(islice(drawn, len(arrivals))), f"open loop: {name}, {rate:.3g} requests/s"


def _prompt(shape: Shape, index: int, seed: int, words: Words) -> str:
    own = random.Random(f"{seed} {index}")
    if shape.prefix is None:
        return words.text(shape.prompt, own)
    which, length = shape.prefix
    beginning = words.text(length, random.Random(f"prefix {seed} {which}"))
    return f"{beginning} {words.text(max(1, shape.prompt - length), own)}"
