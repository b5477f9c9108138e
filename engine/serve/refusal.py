"""Errors as messages to the client whose request they are of."""

from __future__ import annotations

from core.errors import ConflictError, NoRoomError, NotFoundError, RequestError
from core.messages import Failed


def refusal(id: str, error: BaseException) -> Failed:
    """What `container.wire.token_stream.failure_of` makes an error of again."""
    match error:
        case RequestError():
            return Failed(id, "rejected", error.message, error.field)
        case NotFoundError():
            return Failed(id, "not_found", str(error))
        case ConflictError():
            return Failed(id, "conflict", str(error))
        case NoRoomError():
            return Failed(id, "no_room", str(error))
        case _:
            return Failed(id, "failed", f"{type(error).__name__}: {error}")
