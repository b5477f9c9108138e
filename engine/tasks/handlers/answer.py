"""Convert what a handler returned or raised into the outcome of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from core.foreign_code import contained
from engine.tasks.handlers.djl_python import Output
from engine.tasks.performer import FATAL, Answer, Outcome

logger = logging.getLogger(__name__)


def call_handler(call: Callable[[], Answer]) -> Outcome:
    """Return the answer or error of `call`. Raises the errors in FATAL."""
    try:
        with contained:
            return call()
    except FATAL:
        raise
    except Exception as error:
        return log_failure(error)


def log_failure(error: Exception) -> Exception:
    """Log an error with its traceback and return it."""
    logger.warning("the handler failed", exc_info=error)
    return error


def to_answer(result: Any) -> Answer:
    """Convert a handler's result to an answer; None becomes 204 No Content.

    A value that is not an Output is wrapped in one. If an Output has several contents, the answer
    is the one named `data`, else the first.
    """
    if result is None:
        return Answer(b"", "", 204)
    output = result if isinstance(result, Output) else Output().add(result)
    if output.content.is_empty():
        output.add_as_json({"code": output.code, "message": output.message})
    keys = output.content.get_keys()
    return _content(output, keys.index("data") if "data" in keys else 0)


def to_answers(result: Any, count: int) -> list[Outcome] | None:
    """Split a batch's result into answers. Return None unless it has one for each request."""
    if not isinstance(result, Output):
        return None
    indices = [
        position if index is None else index for position, index in enumerate(result.batch_indices)
    ]
    if sorted(indices) != list(range(count)):
        return None
    answers: list[Outcome] = [_content(result, indices.index(index)) for index in range(count)]
    return answers


def _content(output: Output, index: int) -> Answer:
    headers = {name: str(value) for name, value in output.properties.items()}
    content_types = [headers.pop(name) for name in tuple(headers) if name.lower() == "content-type"]
    content_type = content_types[-1] if content_types else output.content_types[index]
    return Answer(output.content.value_at(index), content_type, output.code, headers)
