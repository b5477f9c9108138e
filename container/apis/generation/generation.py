"""One request to the engine, from its submission to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from container.apis.generation.sampling import Dialect
from container.http.deadline import Deadline
from container.http.request_context import RequestContext
from core.errors import GenerationError
from core.output import Output
from core.protocol.messages import AbortReason
from core.protocol.stats import Receipt, Timing
from core.text.answer import AnswerText
from core.text.answers import Answers, Delta

if TYPE_CHECKING:
    from container.wire.token_stream import TokenStream

RECEIPT_WAIT_S = 5.0
"""The engine answers between two steps."""


class Generation:
    """A running request.

    Once `deltas` is exhausted, raises or is closed, the engine no longer works on the request.
    That holds whether the request ended by itself, at a stop string, at the deadline or because
    the client disconnected.
    """

    def __init__(
        self,
        context: RequestContext,
        stream: TokenStream,
        answers: Answers,
        dialect: Dialect,
        prompt_token_ids: Sequence[int],
        deadline: Deadline,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.timing: Timing | None = None
        """Timing of the answer that ended last; None if a stop string ended it."""
        self.receipt: Receipt | None = None
        """What the request has cost, once its last answer has ended. None without option.receipts,
        and if the engine did not say so in time after a stop string."""
        self.received = answers
        """All that the engine has sent."""
        self._stream = stream
        self._dialect = dialect
        self._deadline = deadline
        self._context = context
        self._num_uncharged = len(prompt_token_ids)
        """The prompt's tokens are charged once an answer has begun, because the engine may refuse
        the request until then."""

    @property
    def answers(self) -> Sequence[AnswerText]:
        """The answers to return, as far as they are generated."""
        return self.received.returned

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all answers, including those that `best_of` discards."""
        return self.received.num_tokens

    def deltas(self, *, may_wait: bool = False) -> Iterator[Delta]:
        """Yield new tokens as they arrive. One delta may hold several tokens.

        may_wait: let tokens wait for others, as nobody needs them before the end. Stop strings
        are found as tokens arrive all the same.

        Raises RequestError, OverloadedError, GenerationError or ClientGoneError.
        """
        get = partial(self._get, may_wait=may_wait and not self.received.may_stop)
        try:
            with self._dialect.names_errors():
                while self.received.num_open:
                    for output in self._deadline.wait(get):
                        yield from self._push(output)
        except GenerationError:
            # The deadline has passed. If instead the request failed by itself, it has ended, and
            # `abort` does nothing.
            self.abort("timeout")
            raise
        finally:
            self.abort()
            answers = self.received.returned
            ended = [answer.finish for answer in answers if answer.finish is not None]
            self._context.record.end(ended)

    def divert(self, take: Callable[[Delta], bool]) -> None:
        """Give `take` the deltas that arrive while `deltas` waits, as `TokenStream.divert` does.

        Not with stop strings: to stop takes time.
        """

        def take_all(output: Output) -> bool:
            may_go_on = True
            for delta in self._push(output):
                may_go_on = take(delta) and may_go_on
            return may_go_on

        if not self.received.may_stop:
            self._stream.divert(take_all)

    def abort(self, reason: AbortReason = "disconnect") -> None:
        """Abort the request in the engine. Does nothing if it has ended."""
        self._stream.abort(reason=reason)

    def _stop(self, index: int) -> None:
        """Abort an answer that a stop string has ended. If all have ended, take the receipt."""
        self._stream.abort(index, "stop_string")
        if not self.received.num_open:
            self.receipt = self._stream.receipt(RECEIPT_WAIT_S)
            if self.receipt is not None:
                self._context.record.charge(self.receipt)

    def _get(self, timeout_s: float, *, may_wait: bool) -> list[Output] | None:
        # The first token must not wait, because it is timed.
        is_patient = may_wait and not self._num_uncharged
        return self._stream.get(timeout_s, is_patient=is_patient) or None

    def _push(self, output: Output) -> list[Delta]:
        self.timing, self.receipt = output.timing, output.receipt
        self._context.charge(self._num_uncharged + len(output.token_ids))
        self._num_uncharged = 0
        self._context.record.add(output)
        deltas = self.received.push(output)
        if self.received.may_stop and self.received.is_stopped_by_string(output):
            self._stop(output.index)
        return deltas
