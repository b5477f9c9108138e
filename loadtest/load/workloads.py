"""Named workloads: lengths of their requests, and their default arrivals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from loadtest.load.request import Shape
from loadtest.load.traces import CODE, CONVERSATION

Draw = Callable[[random.Random], Iterator[Shape]]
Loop = Literal["closed", "poisson", "bursts"]

AWS_PROMPTS = (64, 128, 256)
AWS_OUTPUTS = (64, 128, 256)
AWS_DYNAMIC_OUTPUT = 128
"""Output length of every request in the article's dynamic batching measurement."""
SYSTEM_PROMPT = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """A distribution of requests; lengths are in tokens, before `--length-scale`."""

    name: str
    doc: str
    draw: Draw
    loop: Loop = "closed"
    rate: float = 4.0
    """Requests per second of an open loop."""
    fixed_dynamic_output: int | None = None
    """If set, dynamic batching is also measured with all outputs of this length."""


def _aws(rng: random.Random) -> Iterator[Shape]:
    """Yield every pair of lengths once in a random order, then again in another."""
    pairs = [Shape(prompt, output) for prompt in AWS_PROMPTS for output in AWS_OUTPUTS]
    while True:
        rng.shuffle(pairs)
        yield from pairs


def _shared_prefix(rng: random.Random) -> Iterator[Shape]:
    while True:
        suffix, output = rng.choice((32, 64, 128)), rng.choice((64, 128, 256))
        yield Shape(SYSTEM_PROMPT + suffix, output, prefix=(rng.randrange(4), SYSTEM_PROMPT))


def _parallel(rng: random.Random) -> Iterator[Shape]:
    while True:
        yield Shape(rng.choice((128, 256, 512)), rng.choice((64, 128, 256)), samples=4)


def _beam(rng: random.Random) -> Iterator[Shape]:
    while True:
        yield Shape(rng.choice((128, 256, 512)), rng.choice((32, 64, 128)), beams=4)


def _long_prompt_among_streams(rng: random.Random) -> Iterator[Shape]:
    """Yield one long prompt in every eight requests, at a random position."""
    while True:
        long_position = rng.randrange(8)
        for position in range(8):
            is_long = position == long_position
            yield Shape(3072, 16, kind="long") if is_long else Shape(64, 384, kind="stream")


def _burst(rng: random.Random) -> Iterator[Shape]:
    while True:
        yield Shape(rng.choice((64, 256, 512)), rng.choice((64, 128, 256)))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "aws",
            "AWS's article on batching strategies: prompts of 64, 128 and 256 tokens (our choice: "
            "the article only says that there are three lengths), outputs of 64, 128 and 256",
            _aws,
            fixed_dynamic_output=AWS_DYNAMIC_OUTPUT,
        ),
        Workload(
            "chat",
            "lengths and arrivals of a chat service, from --trace or sampled to match Azure's "
            "2023 trace",
            CONVERSATION.shapes,
            loop="poisson",
            rate=CONVERSATION.rate,
        ),
        Workload(
            "code",
            "lengths and arrivals of a code completion service, from --trace or sampled to match "
            "Azure's 2023 trace",
            CODE.shapes,
            loop="poisson",
            rate=CODE.rate,
        ),
        Workload(
            "shared-prefix",
            "one of four system prompts of 256 tokens, followed by 32, 64 or 128 unique tokens; "
            "outputs of 64, 128 and 256",
            _shared_prefix,
        ),
        Workload("parallel", "four samples for every prompt (n=4)", _parallel),
        Workload("beam", "beam search with four beams", _beam),
        Workload(
            "long-prompt-among-streams",
            "streamed outputs of 384 tokens, and one request in eight with a prompt of 3072 tokens",
            _long_prompt_among_streams,
        ),
        Workload(
            "burst",
            "half of the requests in bursts of 16 at once, the other half one by one in between",
            _burst,
            loop="bursts",
        ),
    )
}
