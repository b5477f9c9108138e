"""Which inputs a step computes: those of all running requests, by turns, up to a token budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Generic, NamedTuple, TypeVar

from engine.encoder.own_layers import own_encoder

READ_AT_ONCE = 2**15
"""Characters that a step tokenizes, if its first text is not longer. It takes 1 µs for each."""

MAX_PADDING = 8
"""Padded tokens of a batch for our own layers, in token budgets."""

T = TypeVar("T")
K = TypeVar("K")


class Prepared(NamedTuple, Generic[T]):
    """An input that is ready for the model."""

    num_tokens: int
    position: int
    """Its index in the request."""
    value: T


class Waiting(Generic[T]):
    """The inputs of a request that no step has computed yet, the longest first.

    They are prepared in parts, when the request has its turn: so a request of many texts does not
    make others wait until all of them are tokenized.
    """

    def __init__(
        self, sizes: Sequence[int], prepare: Callable[[list[int]], list[Prepared[T]]]
    ) -> None:
        """sizes: characters of each input. prepare: gets positions, and returns those inputs that
        the model is to compute. It must not raise."""
        self._sizes = sizes
        self._prepare = prepare
        self._unread = sorted(range(len(sizes)), key=sizes.__getitem__)
        self._ready: list[Prepared[T]] = []
        self.num_tokens = 0
        """Tokens taken so far."""

    @property
    def has_ended(self) -> bool:
        return not self._unread and not self._ready

    def end(self) -> None:
        """Drop what is left."""
        self._unread, self._ready = [], []

    def read(self, num_characters: int) -> int:
        """Prepare so many characters unless an input is ready. Return how many it has prepared.

        Prepares at least one input. None may be ready afterwards, if none can be computed.
        """
        num_read = 0
        while self._unread and not self._ready and num_read < num_characters:
            part: list[int] = []
            while self._unread and (not part or num_read < num_characters):
                part.append(self._unread.pop())
                num_read += self._sizes[part[-1]]
            self._ready = sorted(self._prepare(part), key=lambda item: item.num_tokens)
        return num_read

    def take(self, num_tokens: int | None) -> Prepared[T] | None:
        """Return the longest input that is ready and has at most so many tokens; None: any."""
        end = len(self._ready)
        if num_tokens is not None:
            end = bisect_right(self._ready, num_tokens, key=lambda item: item.num_tokens)
        if not end:
            return None
        taken = self._ready.pop(end - 1)
        self.num_tokens += taken.num_tokens
        return taken


def take_turns(running: Mapping[K, Waiting[T]], num_tokens: int) -> list[tuple[K, Prepared[T]]]:
    """Return the inputs of one step, with the keys of their requests, within a token budget.

    The request with the fewest tokens so far has the next turn. So one of a single text waits for
    no more than a step, however many texts the others have. A single input may exceed the budget.
    """
    turns = [(waiting.num_tokens, turn, key) for turn, (key, waiting) in enumerate(running.items())]
    heapify(turns)
    taken: list[tuple[K, Prepared[T]]] = []
    num_characters = READ_AT_ONCE
    while turns and (num_tokens > 0 or not taken):
        _, turn, key = heappop(turns)
        waiting = running[key]
        if num_characters > 0:
            num_characters -= waiting.read(num_characters)
        item = waiting.take(num_tokens if taken else None)
        if item is not None:
            taken.append((key, item))
            num_tokens -= item.num_tokens
            heappush(turns, (waiting.num_tokens, turn, key))
    return taken


def padded_limit(model: Any, num_tokens: int) -> int:
    """Return the padded tokens of a batch. Our own layers take padding, but do not compute it."""
    return num_tokens * (MAX_PADDING if own_encoder(model) else 1)


def batches(items: Sequence[T], length: Callable[[T], int], max_padded: int) -> Iterator[list[T]]:
    """Yield batches of items of similar length, whose padded tokens stay within a limit.

    A single item over the limit is a batch of its own.
    """
    batch: list[T] = []
    for item in sorted(items, key=length):
        if batch and (len(batch) + 1) * length(item) > max_padded:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
