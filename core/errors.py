"""The exceptions that Longshore raises on purpose.

Each class sets `kind`, which identifies the error in a `core.protocol.messages.Failed` from the
engine to a worker, and `status`, the HTTP status that the client gets. Messages say how to fix the
problem, if the user can.
"""

from __future__ import annotations

from typing import ClassVar, Literal

FailureKind = Literal["rejected", "overloaded", "not_found", "conflict", "no_room", "failed"]


class StoppedError(BaseException):
    """Raised by the handler of a signal to end the process.

    Not SystemExit, because the user's code and libraries may raise that themselves.
    """


class LongshoreError(Exception):
    """Base class of all exceptions here."""

    kind: ClassVar[FailureKind] = "failed"
    status: ClassVar[int] = 500
    """HTTP status. For 500 the client gets no details; they are only logged."""
    exit_code: ClassVar[int] = 1
    """Exit code of a process that ends with this error."""


class ConfigurationError(LongshoreError):
    """The configuration or the model cannot be served. Raised at start-up only.

    Restarting the process that ended with this error does not help.
    """

    exit_code = 2


class InsufficientMemoryError(ConfigurationError):
    """There is too little memory for the model."""

    exit_code = 3


class RequestError(LongshoreError):
    """A request is invalid. `field` is the field at fault, as the client spelled it."""

    kind = "rejected"
    status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFoundError(LongshoreError):
    """Something that a request names, such as a model, does not exist."""

    kind = "not_found"
    status = 404


class ConflictError(LongshoreError):
    """The requested name is already taken."""

    kind = "conflict"
    status = 409


class NoRoomError(LongshoreError):
    """There is no memory or slot left for what the request would load."""

    kind = "no_room"
    status = 507


class OverloadedError(LongshoreError):
    """The server is busy. The same request may succeed later.

    The client gets the status of `option.overload_status`.
    """

    kind = "overloaded"
    status = 503


class RateLimitError(LongshoreError):
    """An API key has used up one of its limits."""

    status = 429

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(LongshoreError):
    """The engine is still starting, or has died."""

    status = 503


class GenerationError(LongshoreError):
    """An accepted request failed while it ran."""

    status = 424  # LMI's status for this
