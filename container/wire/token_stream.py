"""The tokens that the engine generates for one request, queued for the request's handler."""

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
from core.output import Output, joined
from core.protocol.messages import AbortReason, Failed
from core.protocol.stats import Receipt

_ERROR_OF_KIND = {
    error.kind: error
    for error in (
        OverloadedError,
        NotFoundError,
        ConflictError,
        NoRoomError,
        GenerationError,
    )
}


class TokenStream:
    """The tokens of one request; the tokens of each of its answers arrive in order."""

    awaits_receipt: bool = False
    """Whether all answers have ended, the last one at a stop string, but its receipt is still to
    come."""

    def __init__(
        self,
        id: str,
        num_answers: int,
        on_abort: Callable[[str, int | None, AbortReason], None],
    ) -> None:
        """`on_abort` is called with the id, an answer's index or None for all, and the reason."""
        self.id = id
        self._on_abort = on_abort
        self._arrived: gevent.queue.SimpleQueue[Output | Failed] = gevent.queue.SimpleQueue()
        self._failed: Failed | None = None
        self._open = set(range(num_answers))
        """Indices of the answers that have not ended."""

    @property
    def has_ended(self) -> bool:
        """Whether no more messages will arrive."""
        return not self._open and not self.awaits_receipt

    def get(self, timeout_s: float) -> list[Output]:
        """Return everything that has arrived, merged into one output per answer.

        Waits up to `timeout_s` for the first message and returns an empty list if none arrives.
        Raises the error that `failure_of` returns when the engine reports a failure.
        """
        outputs: list[Output] = []
        for message in [] if self._failed else self._drain(timeout_s):
            if isinstance(message, Failed):
                self._failed = message
                break
            outputs.append(message)
        if self._failed and not outputs:
            raise failure_of(self._failed)
        return _merged(outputs)

    def receipt(self, timeout_s: float) -> Receipt | None:
        """Return the receipt of a request whose last answer was aborted at a stop string.

        None if the engine gives none, or not within `timeout_s`.
        """
        return None

    def push(self, message: Output | Failed) -> None:
        """Add a message that the engine sent. Only EngineConnection calls this."""
        if isinstance(message, Failed):
            self._open.clear()
        elif message.finish is not None:
            self._open.discard(message.index)
        self._arrived.put(message)

    def abort(self, index: int | None = None, reason: AbortReason = "disconnect") -> None:
        """Abort one answer, or all if `index` is None. Does nothing for answers that have ended.

        May be called at any time.
        """
        aborted = self._open if index is None else self._open & {index}
        if aborted:
            self._open = self._open - aborted
            self._on_abort(self.id, index if self._open else None, reason)

    def _drain(self, timeout_s: float) -> list[Output | Failed]:
        try:
            messages = [self._arrived.get(timeout=timeout_s)]
            while not self._arrived.empty():
                messages.append(self._arrived.get_nowait())
        except gevent.queue.Empty:
            return []
        return messages


def _merged(outputs: Iterable[Output]) -> list[Output]:
    """Merge the outputs into one per answer, in the order in which the answers first appear."""
    by_index: dict[int, list[Output]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [joined(parts) if len(parts) > 1 else parts[0] for parts in by_index.values()]


def failure_of(failed: Failed) -> LongshoreError:
    """Return the error to raise for a failure that the engine reported."""
    if failed.kind == RequestError.kind:
        return RequestError(failed.field, failed.message)
    return _ERROR_OF_KIND[failed.kind](failed.message)
