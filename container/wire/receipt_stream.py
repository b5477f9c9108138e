"""The tokens of a request whose engine says what the request has cost (option.receipts)."""

from __future__ import annotations

from collections.abc import Callable

import gevent.event

from container.wire.token_stream import TokenStream
from core.output import Output
from core.protocol.messages import AbortReason, Charged, Failed
from core.protocol.stats import Receipt


class ReceiptStream(TokenStream):
    """The receipt comes with the last output or, after an abort at a stop string, alone."""

    def __init__(
        self,
        id: str,
        num_answers: int,
        on_abort: Callable[[str, int | None, AbortReason], None],
    ) -> None:
        super().__init__(id, num_answers, on_abort)
        self._receipt: gevent.event.AsyncResult[Receipt | None] = gevent.event.AsyncResult()

    def receipt(self, timeout_s: float) -> Receipt | None:
        if self.awaits_receipt:
            self._receipt.wait(timeout_s)
        if self.awaits_receipt:  # it has not come in time
            self.awaits_receipt = False
            self._on_abort(self.id, None, "stop_string")
        return self._receipt.value

    def push(self, message: Output | Charged | Failed) -> None:
        receipt = None if isinstance(message, Failed) else message.receipt
        if isinstance(message, Failed) or receipt is not None:
            self.awaits_receipt = False
            self._receipt.set(receipt)
        if not isinstance(message, Charged):
            super().push(message)

    def abort(self, index: int | None = None, reason: AbortReason = "disconnect") -> None:
        if self._open and (index is None or self._open == {index}):
            self.awaits_receipt = reason == "stop_string"
        super().abort(index, reason)
