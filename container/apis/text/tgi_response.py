"""Answers as text-generation-inference writes them."""

from __future__ import annotations

from container.apis.generation.reply import Record
from container.apis.text.response import TextFormat
from container.http.failures import Failure


class TgiFormat(TextFormat):
    """Writes answers as the route /generate does. A failed stream ends with LMI's last record, to
    which the `error` of text-generation-inference is added."""

    _special = "special"
    _num_sent = 0

    def failure(self, failure: Failure) -> Record:
        return {**self._failed(failure), "error": failure.message, "error_type": "generation"}

    def _in_stream(self, record: Record) -> Record:
        self._num_sent += 1
        return {**super()._in_stream(record), "index": self._num_sent}

    def _own_details(self) -> Record:
        return {"inputs": self._request.text, **super()._own_details()}

    def _token(self, token_id: int, text: str, logprob: float | None) -> Record:
        is_special = token_id in self._tokenizer.special_ids
        return {**super()._token(token_id, text, logprob), "special": is_special}


class TgiListFormat(TgiFormat):
    """Writes answers as the route / does: always with details, and a document in a list."""

    always_details = True

    def document(self) -> object:
        document = super().document()
        return [document] if self._request.batch is None else document


def tgi_error(failure: Failure) -> Record:
    """Return the body of an error response."""
    kind = "validation" if failure.is_client_error else "generation"
    if failure.code in (429, 503):
        kind = "overloaded"
    return {"error": failure.message, "error_type": kind}
