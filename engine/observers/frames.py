"""The format of a recording: what the scheduler saw and did, without any text.

A recording is a sequence of frames, each a msgpack array after its length in 4 bytes (big endian).
The first element of a frame says which of the classes below it is, the others are its fields in
order. Times are seconds of the engine's monotonic clock, or integer nanoseconds (`*_ns`).

Tokens are not recorded, only digests of the links from which prefixes are identified
(strategies/memory/prefix.py). They are keyed with a secret that no file has, so they tell nothing
but which of the recording's links are the same.

A step of sequences that continue, each with as many tokens as in the step before, takes some 40
bytes in all; any other step at most 20 bytes for each sequence, and 17 bytes for each full link.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from core.plan import BlockPairs
from engine.executor import FailedAt
from strategies.factory import StrategySettings

VERSION = 1
DIGEST_BYTES = 8


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of all frames."""


class Header(Frame, frozen=True, tag=0):
    """Begins every file."""

    version: int
    settings: StrategySettings
    executor: Literal["packed", "library", "task"]
    overlaps: bool
    drafts: bool
    """Whether chunks may have drafts: a decode's length is 1 and their number."""
    link_tokens: int
    """Tokens of the links that have a digest."""
    weights_bytes: int
    number: int
    """Of the file in its run, from 0."""
    is_idle: bool
    """Whether there was no request when the file began."""


class Arrived(Frame, frozen=True, tag=1):
    """A request was queued."""

    at: float
    id: int
    num_prompt_tokens: int
    max_tokens: int
    links: bytes
    """The digests of the prompt's full links, one after the other."""
    salt: bytes
    """The digest of what else must be equal for prefixes to be shared, such as cache_salt."""
    num_samples: int = 1
    num_answers: int = 1
    width: int = 0
    """If the request is a search: how many sequences it keeps. It has one to begin with."""
    priority: int = 0
    is_scored: bool = False
    """Whether logits of the prompt are wanted, so that its prefix is computed."""
    needs_newest: bool = False
    """Whether a token must be known before the next one is scheduled."""
    uncut: tuple[tuple[int, int], ...] = ()
    """Spans of the prompt that no chunk may cut."""


class Aborted(Frame, frozen=True, tag=2):
    """A request, or its answer `index`, was ended from outside."""

    at_ns: int
    id: int
    index: int | None
    reason: str


class Waited(Frame, frozen=True, tag=3):
    """Nothing was scheduled, although there were requests or a step in flight."""

    at: float


class Scheduled(Frame, frozen=True, tag=4):
    """The strategy scheduled a step."""

    at: float
    ids: list[int] | None
    """The sequences, in order. None, as the next two: each continues from its last chunk with one
    of the same length."""
    starts: list[int] | None
    lengths: list[int] | None
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int
    """Since the engine started. A sequence that was preempted, and not swapped out, starts again
    before its last end."""
    swap_outs: BlockPairs = ()
    swap_ins: BlockPairs = ()
    copies: BlockPairs = ()
    state_swap_outs: BlockPairs = ()
    state_swap_ins: BlockPairs = ()


class Searched(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step of a request that keeps the best of all continuations of its sequences."""

    request_id: int
    parents: list[int]
    """For each sequence, the index of the one before that it continues. Without any, the search is
    done."""
    links: bytes = b""
    """If the newest token fills a link, the digest for each sequence."""


class Answered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step added to a sequence other than one token that does not end it by itself."""

    id: int
    num_tokens: int
    is_last: bool
    """Whether the last token ends the answer before its greatest length."""


class Done(Frame, frozen=True, tag=5):
    """A step was committed, or it failed."""

    num_newer: int
    """Steps that were scheduled after it."""
    wall_ns: int
    """From the beginning of the engine's step to its end."""
    model_ns: int
    """Of it, the time in which the model computed on the CPU, or the engine waited for a device."""
    failed: FailedAt | None = None
    answered: list[Answered] = []
    link_ids: list[int] = []
    """The sequences whose newest token fills a link, where it ends, and its digest."""
    link_ends: list[int] = []
    links: bytes = b""
    searched: list[Searched] = []
    not_sampled: list[int] = []
    """Sequences for which no token could be sampled."""
    errors: list[int] = []
    """Requests that ended with an error."""


AnyFrame = Header | Arrived | Aborted | Waited | Scheduled | Done
