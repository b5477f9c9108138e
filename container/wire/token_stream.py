"""What the engine says of one request, waiting for whoever serves that request."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import gevent.queue

from core.errors import (
    ConflictError,
    GenerationError,
    LongshoreError,
    NoRoomError,
    NotFoundError,
    OverloadedError,
    RequestError,
)
from core.messages import Failed, Generated


class TokenStream:
    """The tokens of one submitted request, those of each answer in order, up to their ends."""

    def __init__(
        self, id: str, num_answers: int, on_abort: Callable[[str, int | None], None]
    ) -> None:
        """`on_abort` gets the id, and the index of the answer where not all are aborted."""
        self.id = id
        self._on_abort = on_abort
        self._arrived: gevent.queue.SimpleQueue[Generated | Failed] = gevent.queue.SimpleQueue()
        self._failed: Failed | None = None
        self._open = set(range(num_answers))
        """Indices of the answers that have not ended."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return not self._open

    def get(self, timeout_s: float) -> list[Generated]:
        """All that has arrived, as one message for each answer; nothing where nothing did in time.

        Raises RequestError, NotFoundError, OverloadedError or GenerationError where the engine
        says so.
        """
        generated: list[Generated] = []
        for message in [] if self._failed else self._waiting(timeout_s):
            if isinstance(message, Failed):
                self._failed = message
                break
            generated.append(message)
        if self._failed and not generated:
            raise failure_of(self._failed)
        return _merged(generated)

    def push(self, message: Generated | Failed) -> None:
        """Takes in a message of the engine; for the client alone."""
        if isinstance(message, Failed):
            self._open.clear()
        elif message.finish is not None:
            self._open.discard(message.index)
        self._arrived.put(message)

    def abort(self, index: int | None = None) -> None:
        """Has the engine stop, with one answer or with all, unless they ended by themselves.

        May be called at any time.
        """
        aborted = self._open if index is None else self._open & {index}
        if aborted:
            self._open = self._open - aborted
            self._on_abort(self.id, index if self._open else None)

    def _waiting(self, timeout_s: float) -> list[Generated | Failed]:
        try:
            messages = [self._arrived.get(timeout=timeout_s)]
            while not self._arrived.empty():
                messages.append(self._arrived.get_nowait())
        except gevent.queue.Empty:
            return []
        return messages


def _merged(messages: Iterable[Generated]) -> list[Generated]:
    """One message for each answer, in the order of their first ones."""
    by_index: dict[int, list[Generated]] = {}
    for message in messages:
        by_index.setdefault(message.index, []).append(message)
    return [_joined(each) if len(each) > 1 else each[0] for each in by_index.values()]


def _joined(parts: list[Generated]) -> Generated:
    return Generated(
        parts[0].id,
        tuple(token_id for part in parts for token_id in part.token_ids),
        tuple(logprob for part in parts for logprob in part.logprobs),
        parts[-1].finish,
        parts[0].index,
        top=tuple(top for part in parts for top in part.top),
        prompt=tuple(scores for part in parts for scores in part.prompt),
        timing=parts[-1].timing,
    )


def failure_of(failed: Failed) -> LongshoreError:
    """The error to raise for what the engine said."""
    match failed.kind:
        case "rejected":
            return RequestError(failed.field, failed.message)
        case "overloaded":
            return OverloadedError(failed.message)
        case "not_found":
            return NotFoundError(failed.message)
        case "conflict":
            return ConflictError(failed.message)
        case "no_room":
            return NoRoomError(failed.message)
        case "failed":
            return GenerationError(failed.message)
