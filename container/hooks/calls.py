"""Calls the user's hooks in a worker, which runs greenlets but no asyncio event loop.

An async hook may await the methods of its request and `call_next`, which need no event loop. For
other I/O it must call blocking functions. While a socket blocks, gevent runs other requests.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Coroutine
from typing import Any, cast

import gevent
from werkzeug.exceptions import HTTPException

from container.hooks.load import Function
from core.errors import GenerationError, LongshoreError
from core.foreign_code import contained, reason_of

logger = logging.getLogger(__name__)


def call(option: str, function: Function, *arguments: object) -> object:
    """Call a hook and return its result.

    An exception whose `status_code` is that of an error, such as Starlette's HTTPException, becomes
    werkzeug's HTTPException of that status. LongshoreErrors and werkzeug's own HTTPExceptions pass
    unchanged. Any other exception becomes a GenerationError that names the option.
    """
    try:
        with contained:
            result = function(*arguments)
            return _finished(result) if inspect.iscoroutine(result) else result
    except (LongshoreError, HTTPException):
        raise
    except Exception as error:
        status = getattr(error, "status_code", None)
        if isinstance(status, int) and 400 <= status <= 599:
            raise _refusal(status, getattr(error, "detail", None)) from error
        logger.warning("option.%s failed", option, exc_info=error)
        raise GenerationError(f"option.{option}: {reason_of(error)}") from error


def takes_request(function: Function) -> bool:
    """Return whether a function has a parameter. A ping hook may have none."""
    return bool(inspect.signature(function).parameters)


def _finished(coroutine: Coroutine[Any, Any, object]) -> object:
    """Run a coroutine to its end. Raises RuntimeError if it waits for an event loop."""
    try:
        while coroutine.send(None) is None:  # asyncio.sleep(0) yields None
            gevent.sleep(0)
    except StopIteration as stop:
        return cast(object, stop.value)
    finally:
        coroutine.close()
    raise RuntimeError("hooks run without an event loop; call blocking functions instead")


def _refusal(status: int, detail: object) -> HTTPException:
    error = HTTPException(str(detail or "refused"))
    error.code = status
    return error
