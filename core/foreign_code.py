"""Calls of code that is not Longshore's: libraries, the code of models, and the user's own.

Such code may raise a BaseException that is not an Exception: a panic of a Rust library,
asyncio.CancelledError, SystemExit or GeneratorExit. Code that fails one request for any Exception
does not see it, so it would end the whole process.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType

from core.errors import StoppedError


class EscapedError(Exception):
    """Foreign code raised a BaseException that is not an Exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def reason_of(error: BaseException) -> str:
    """Return the type and the message of an error that foreign code has raised."""
    return str(error) if isinstance(error, EscapedError) else f"{type(error).__name__}: {error}"


class _Contained(AbstractContextManager[None, None]):
    """Turns what would end the process into an EscapedError.

    KeyboardInterrupt, StoppedError and the end of a greenlet pass: they do not come from the code
    in the context.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not _passes(error):
            raise EscapedError(error) from error


def _passes(error: BaseException) -> bool:
    if isinstance(error, Exception | KeyboardInterrupt | StoppedError):
        return True
    greenlet = sys.modules.get("greenlet")  # only the front end has it
    return greenlet is not None and isinstance(error, greenlet.GreenletExit)


contained = _Contained()
"""The context for calls of foreign code. It may be entered again and again, by several threads."""
