"""Several iterators merged into one, in the order in which their items arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import gevent
import gevent.queue

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


class _End:
    """Says that one of the iterators is exhausted."""


def interleave(iterators: Sequence[Iterator[T]]) -> Iterator[T]:
    """Yield the items of all iterators as they arrive. Each iterator runs in its own greenlet.

    The first exception of an iterator is raised here. After that, or when this generator is
    closed, the greenlets of the other iterators are killed.
    """
    return iterators[0] if len(iterators) == 1 else _interleave(iterators)


def _interleave(iterators: Sequence[Iterator[T]]) -> Iterator[T]:
    arrived: gevent.queue.SimpleQueue[_Item[T] | _Failed | _End] = gevent.queue.SimpleQueue()

    def pump(iterator: Iterator[T]) -> None:
        try:
            for value in iterator:
                arrived.put(_Item(value))
        except Exception as error:
            arrived.put(_Failed(error))
        else:
            arrived.put(_End())

    pumps: list[gevent.Greenlet[..., None]] = [
        gevent.spawn(pump, iterator) for iterator in iterators
    ]
    try:
        num_running = len(pumps)
        while num_running:
            match arrived.get():
                case _Item(value):
                    yield value
                case _Failed(error):
                    raise error
                case _End():
                    num_running -= 1
    finally:
        gevent.killall(pumps)
