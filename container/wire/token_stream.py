"""The tokens that the engine generates for one request, queued for the request's handler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import gevent
from gevent.hub import Waiter

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
        self._arrived: list[Output] = []
        self._failure: Exception | None = None
        self._open = set(range(num_answers))
        """Indices of the answers that have not ended."""
        self._waiter: Waiter[None] | None = None
        """Of the greenlet that waits in `get`."""
        self._waits_for_end = False
        """Whether that greenlet waits for the end of an answer."""
        self._is_urgent = False
        """Whether an answer, or all, have ended since the last `get`."""
        self._take: Callable[[Output], bool] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no more messages will arrive."""
        return not self._open and not self.awaits_receipt

    def get(self, timeout_s: float, *, is_patient: bool = False) -> list[Output]:
        """Return everything that has arrived, merged into one output per answer.

        Waits up to `timeout_s` for the first message or, if `is_patient`, for the end of an
        answer. Returns an empty list if nothing has arrived. Raises the error that `failure_of`
        returns when the engine reports a failure.
        """
        if self._failure is None and (not self._arrived or (is_patient and self._open)):
            self._wait(timeout_s, for_end=is_patient)
        outputs, self._arrived = self._arrived, []
        self._is_urgent = False
        if self._failure is not None and not outputs:
            raise self._failure
        return outputs if len(outputs) < 2 else _merged(outputs)

    def divert(self, take: Callable[[Output], bool]) -> None:
        """Let `take` have the outputs that arrive while `get` waits, without waking its greenlet.

        `take` must not wait. It is called until it returns False. Answers' last outputs, and what
        arrives with them, are left to `get`, which also raises what `take` raises.
        """
        self._take = take

    def receipt(self, timeout_s: float) -> Receipt | None:
        """Return the receipt of a request whose last answer was aborted at a stop string.

        None if the engine gives none, or not within `timeout_s`.
        """
        return None

    def push(self, message: Output | Failed) -> None:
        """Add a message that the engine sent. Only EngineConnection calls this, then `deliver`."""
        if isinstance(message, Failed):
            self._failure = failure_of(message)
            self._open.clear()
            self._is_urgent = True
            return
        self._arrived.append(message)
        if message.finish is not None:
            self._open.discard(message.index)
            self._is_urgent = True

    def deliver(self) -> None:
        """Hand what has been pushed to the greenlet that waits in `get`, if one does."""
        if self._waiter is None or not (self._is_urgent or self._hands_on()):
            return
        gevent.get_hub().loop.run_callback(self._waiter.switch, None)
        self._waiter = None

    def _hands_on(self) -> bool:
        """Return whether the waiting greenlet must wake up, unless `take` has what has arrived."""
        if self._take is not None:
            self._give()
        return self._is_urgent or (bool(self._arrived) and not self._waits_for_end)

    def _give(self) -> None:
        """Give what has arrived to `take`, until it returns False."""
        if len(self._arrived) > 1:
            self._arrived = _merged(self._arrived)
        try:
            while self._take is not None and self._arrived:
                if not self._take(self._arrived.pop(0)):
                    self._take = None
        except Exception as error:
            self._failure, self._is_urgent = error, True
            self._arrived.clear()

    def abort(self, index: int | None = None, reason: AbortReason = "disconnect") -> None:
        """Abort one answer, or all if `index` is None. Does nothing for answers that have ended.

        May be called at any time.
        """
        aborted = self._open if index is None else self._open & {index}
        if aborted:
            self._open = self._open - aborted
            self._on_abort(self.id, index if self._open else None, reason)

    def _wait(self, timeout_s: float, *, for_end: bool) -> None:
        """Let other greenlets run until `push` wakes this one, or the time is over.

        A `gevent.Timeout` would take several times as long to start and stop.
        """
        hub = gevent.get_hub()
        waiter: Waiter[None] = Waiter(hub)
        self._waiter = waiter
        self._waits_for_end = for_end
        timer = hub.loop.timer(timeout_s)
        timer.start(waiter.switch, None)
        try:
            waiter.get()
        finally:
            timer.close()
            self._waiter = None


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
