"""The named workloads: how long requests are, and how they come unless told otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from loadtest.ask import Shape
from loadtest.traces import CODE, CONVERSATION

Draw = Callable[[random.Random], Iterator[Shape]]
Loop = Literal["closed", "poisson", "bursts"]

AWS_PROMPTS = (64, 128, 256)
AWS_ANSWERS = (64, 128, 256)
AWS_DYNAMIC_ANSWER = 128
"""Of every request with which the article measured dynamic batching."""
SYSTEM_PROMPT = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in tokens, before `--length-scale`."""

    name: str
    doc: str
    draw: Draw
    loop: Loop = "closed"
    rate: float = 4.0
    """Requests per second of an open loop."""
    fixed_dynamic_answer: int | None = None
    """Dynamic batching is measured a second time, with all answers of this length."""


def _aws(rng: random.Random) -> Iterator[Shape]:
    """Every pair of lengths once, in a random order, and again."""
    pairs = [Shape(prompt, answer) for prompt in AWS_PROMPTS for answer in AWS_ANSWERS]
    while True:
        rng.shuffle(pairs)
        yield from pairs


def _shared_prefix(rng: random.Random) -> Iterator[Shape]:
    while True:
        own, answer = rng.choice((32, 64, 128)), rng.choice((64, 128, 256))
        yield Shape(SYSTEM_PROMPT + own, answer, prefix=(rng.randrange(4), SYSTEM_PROMPT))


def _parallel(rng: random.Random) -> Iterator[Shape]:
    while True:
        yield Shape(rng.choice((128, 256, 512)), rng.choice((64, 128, 256)), samples=4)


def _beam(rng: random.Random) -> Iterator[Shape]:
    while True:
        yield Shape(rng.choice((128, 256, 512)), rng.choice((32, 64, 128)), beams=4)


def _long_prompt_among_streams(rng: random.Random) -> Iterator[Shape]:
    """One long prompt in eight, at a random place."""
    while True:
        place = rng.randrange(8)
        for at in range(8):
            is_long = at == place
            yield Shape(3072, 16, kind="long") if is_long else Shape(64, 384, kind="stream")


def _burst(rng: random.Random) -> Iterator[Shape]:
    while True:
        yield Shape(rng.choice((64, 256, 512)), rng.choice((64, 128, 256)))


WORKLOADS = {
    each.name: each
    for each in (
        Workload(
            "aws",
            "AWS's article on batching strategies: prompts of 64, 128 and 256 tokens (our choice: "
            "it only says that there are three), answers of 64, 128 and 256",
            _aws,
            fixed_dynamic_answer=AWS_DYNAMIC_ANSWER,
        ),
        Workload(
            "chat",
            "lengths and arrivals of a chat service: --trace, or drawn like Azure's of 2023",
            CONVERSATION.shapes,
            loop="poisson",
            rate=CONVERSATION.rate,
        ),
        Workload(
            "code",
            "lengths and arrivals of a code-completion service: --trace, or drawn like Azure's",
            CODE.shapes,
            loop="poisson",
            rate=CODE.rate,
        ),
        Workload(
            "shared-prefix",
            "four system prompts of 256 tokens, each followed by 32, 64 or 128 of its own; answers "
            "of 64, 128 and 256",
            _shared_prefix,
        ),
        Workload("parallel", "four sampled answers to every prompt (n=4)", _parallel),
        Workload("beam", "beam search with four beams", _beam),
        Workload(
            "long-prompt-among-streams",
            "answers of 384 tokens that stream, and one prompt in eight of 3072 tokens",
            _long_prompt_among_streams,
        ),
        Workload(
            "burst",
            "half of the requests in bursts of 16 at once, half one by one between them",
            _burst,
            loop="bursts",
        ),
    )
}
