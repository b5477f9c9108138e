"""The parts of one HTTP request that the APIs need, passed as an argument."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from flask import g, request
from werkzeug.datastructures import Headers
from werkzeug.exceptions import RequestEntityTooLarge, UnsupportedMediaType

from container.http.client_connection import SendChunk
from container.http.deadline import ClientGoneError
from container.http.failures import Failure, describe
from container.http.off_loop import LONG_BODY_BYTES, in_thread_if_long
from container.http.request_record import RequestRecord
from container.schema.body import is_json_type, read_csv, read_json, read_text
from core.configuration.limits import CSV_BYTES
from core.errors import LongshoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CheckedRequest(Protocol):
    """A request whose fields are checked."""

    @property
    def warnings(self) -> Sequence[str]:
        """One sentence for each field that has no effect."""
        ...


Checked = TypeVar("Checked", bound=CheckedRequest)

SESSION_HEADER = "X-Amzn-SageMaker-Session-Id"
DIGEST_HEADER = "X-Longshore-Digest"
MAX_WARNINGS = 1000


class BodyTooLargeError(LongshoreError):
    """A body is within `max_request_size`, but too long for its type."""

    status = 413


def client_body() -> bytes:
    """Return the body that the client has sent. Raises as `request_context` does."""
    body, limit = request.get_data(), request.max_content_length
    # NOTE: werkzeug cuts a chunked body at the limit without raising an error.
    if request.content_length is None and limit is not None and len(body) >= limit:
        raise RequestEntityTooLarge
    return body


def _count_nothing(num_tokens: int) -> None:
    """Do nothing: the request has no API key, or its key has no limit."""


@dataclass(slots=True)
class RequestContext:
    """One HTTP request: `g.context`. Only functions that Flask calls use Flask's `request` and `g`
    instead of this."""

    id: str
    headers: Headers
    mimetype: str
    """The Content-Type without parameters, in lower case; '' if the request has none."""
    has_hung_up: Callable[[], bool]
    """Returns whether the client has closed its connection."""
    is_new_warning: Callable[[str], bool]
    """Returns whether a warning has not been logged yet."""
    send_chunk: SendChunk | None = None
    """Sends a part of a stream past Flask and the server, once they have sent its beginning."""
    read_body: Callable[[], bytes] = client_body
    """Called by the route. Hooks may have replaced the body that the client has sent."""
    body: bytes = b""
    """Empty if the request was refused before its body was read."""
    accept: str | None = None
    """The media types that the client accepts, as in an `Accept` header."""
    charge: Callable[[int], None] = _count_nothing
    """Counts tokens, of the prompt or generated, against the limit of the request's API key."""
    api_key: str = ""
    """The name of that key; '' without any."""
    record: RequestRecord = field(default_factory=RequestRecord)
    """The figures of the request for the log and the traces."""
    response_headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers to add to the response. Changes after the route function returns have no effect."""

    @property
    def session(self) -> str | None:
        """The id of SageMaker's session that the request belongs to, or has just opened."""
        return self.response_headers.get(SESSION_HEADER) or self.headers.get(SESSION_HEADER)

    @property
    def digest(self) -> str | None:
        """The digest of what may change the answer's bits, once a generation has begun."""
        return self.response_headers.get(DIGEST_HEADER)

    def json_fields(self) -> dict[str, object]:
        """Parse a JSON body.

        Raises UnsupportedMediaType for other types and RequestError for malformed JSON.
        """
        if not is_json_type(self.mimetype):
            raise UnsupportedMediaType(f"Content-Type {self.mimetype}: send application/json")
        return self.checked(lambda: read_json(self.body))

    def fields(self) -> dict[str, object]:
        """Parse a JSON, text or CSV body.

        Raises as `json_fields` does, and BodyTooLargeError for CSV that is longer than its limit.
        """
        if is_json_type(self.mimetype):
            return self.checked(lambda: read_json(self.body))
        return self._other_fields()

    def _other_fields(self) -> dict[str, object]:
        if self.mimetype == "text/plain":
            return self.checked(lambda: read_text(self.body))
        if self.mimetype != "text/csv":
            raise UnsupportedMediaType(
                f"Content-Type {self.mimetype}: send application/json, text/plain or text/csv"
            )
        if len(self.body) > CSV_BYTES.maximum:
            raise BodyTooLargeError(
                f"the body is larger than {CSV_BYTES.maximum:,} bytes, the maximum for text/csv"
            )
        return self.checked(lambda: read_csv(self.body))

    def describe(self, error: Exception) -> Failure:
        """Log an error in a response that has begun, and return the failure that ends it."""
        self.record.failure = describe(error, self.id)
        return self.record.failure

    def note_client_gone(self) -> None:
        """Note that nobody reads the rest of the response."""
        self.describe(ClientGoneError())

    def checked(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, which reads the body. Call it in a thread if the body is
        long."""
        return in_thread_if_long(read, size=len(self.body), long=LONG_BODY_BYTES)

    def read(self, read: Callable[[], Checked]) -> Checked:
        """Return the request that `read` makes of the body, and report the fields it ignores."""
        request = self.checked(read)
        if request.warnings:
            self.warn(request.warnings)
        return request

    def warn(self, warnings: Sequence[str]) -> None:
        """Report ignored fields in X-Longshore-Warning. Log each warning only the first time."""
        for warning in filter(self.is_new_warning, warnings):
            logger.warning("request=%s event=field_ignored reason=%r", self.id, warning)
        if warnings:
            self.response_headers["X-Longshore-Warning"] = "; ".join(warnings)


def request_context(accept_header: str = "Accept") -> RequestContext:
    """Return the context of the request that Flask is handling, with its body; for route functions.

    `accept_header` names the header that becomes `RequestContext.accept`. Raises
    RequestEntityTooLarge if the body is longer than `max_request_size`, and what reading the body
    raises (`container/front_end/arrival.py`).
    """
    context: RequestContext = g.context
    context.accept = context.headers.get(accept_header)
    context.body = context.read_body()
    return context


class LoggedWarnings:
    """The warnings that a worker has logged, so that a repeated one is not logged again.

    Once there are MAX_WARNINGS, no further warning is logged: clients choose the fields' names, so
    the warnings could otherwise grow without limit.
    """

    def __init__(self) -> None:
        self._warnings: set[str] = set()

    def add(self, warning: str) -> bool:
        """Return whether the warning is new, and remember it."""
        if warning in self._warnings or len(self._warnings) == MAX_WARNINGS:
            return False
        self._warnings.add(warning)
        return True
