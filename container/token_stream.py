"""What the engine says of one request, waiting for whoever serves that request."""

from __future__ import annotations

from collections.abc import Callable

import gevent.queue

from core.errors import GenerationError, LongshoreError, OverloadedError, RequestError
from core.messages import Failed, Generated
from core.sampling import TopLogprobs


class TokenStream:
    """The tokens of one submitted request, in order, up to its terminal message."""

    def __init__(self, id: str, on_abort: Callable[[str], None]) -> None:
        self.id = id
        self._on_abort = on_abort
        self._arrived: gevent.queue.SimpleQueue[Generated | Failed] = gevent.queue.SimpleQueue()
        self._failed: Failed | None = None
        self._ended = False

    def get(self, timeout_s: float) -> Generated | None:
        """All tokens that have arrived, at least one message; None where none did in time.

        Raises RequestError, OverloadedError or GenerationError where the engine says so.
        """
        if self._failed is None:
            merged = self._collect(timeout_s)
            if merged is not None or self._failed is None:
                return merged
        raise failure_of(self._failed)

    def push(self, message: Generated | Failed) -> None:
        """Takes in a message of the engine; for the client alone."""
        self._ended = isinstance(message, Failed) or message.finish is not None
        self._arrived.put(message)

    def abort(self) -> None:
        """Has the engine stop, unless it ended by itself; may be called at any time."""
        if not self._ended:
            self._ended = True
            self._on_abort(self.id)

    def _collect(self, timeout_s: float) -> Generated | None:
        finish = None
        token_ids: list[int] = []
        logprobs: list[float] = []
        top: list[TopLogprobs] = []
        prompt: list[TopLogprobs] = []
        for message in self._waiting(timeout_s):
            if isinstance(message, Failed):
                self._failed = message
                break
            token_ids += message.token_ids
            logprobs += message.logprobs
            top += message.top
            prompt += message.prompt
            finish = message.finish
            if finish is not None:
                break
        if finish is None and not token_ids and not prompt:
            return None
        tokens = tuple(token_ids), tuple(logprobs)
        return Generated(self.id, *tokens, finish, top=tuple(top), prompt=tuple(prompt))

    def _waiting(self, timeout_s: float) -> list[Generated | Failed]:
        try:
            messages = [self._arrived.get(timeout=timeout_s)]
            while not self._arrived.empty():
                messages.append(self._arrived.get_nowait())
        except gevent.queue.Empty:
            return []
        return messages


def failure_of(failed: Failed) -> LongshoreError:
    """The error to raise for what the engine said."""
    if failed.kind == "rejected":
        return RequestError(failed.field, failed.message)
    return {"overloaded": OverloadedError, "failed": GenerationError}[failed.kind](failed.message)
