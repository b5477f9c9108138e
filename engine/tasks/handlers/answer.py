"""What the user's code returned or raised, as the outcome of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from djl_python import Output
from engine.tasks.performer import Answer, Outcome

logger = logging.getLogger(__name__)


def attempt(call: Callable[[], Answer]) -> Outcome:
    """The answer, or the error. Raises what says that the device itself has failed."""
    try:
        return call()
    except torch.AcceleratorError:
        raise
    except (Exception, SystemExit) as error:
        return failed(error)


def failed(error: BaseException) -> Exception:
    """The error, logged with its lines; `sys.exit` ends one request and not the engine."""
    logger.warning("the handler failed", exc_info=error)
    return error if isinstance(error, Exception) else RuntimeError(f"sys.exit({error})")


def answer_of(result: Any) -> Answer:
    """Of an Output, or a value for which one is made; None: no content.

    Where there are several contents the one named `data` counts, else the first.
    """
    if result is None:
        return Answer(b"", "", 204)
    output = result if isinstance(result, Output) else Output().add(result)
    if output.content.is_empty():
        output.add_as_json({"code": output.code, "message": output.message})
    keys = output.content.get_keys()
    return _content(output, keys.index("data") if "data" in keys else 0)


def answers_of(result: Any, count: int) -> list[Outcome] | None:
    """Of a batch; None where there is not one for each of its requests."""
    if not isinstance(result, Output):
        return None
    indices = [at if index is None else index for at, index in enumerate(result.batch_indices)]
    if sorted(indices) != list(range(count)):
        return None
    answers: list[Outcome] = [_content(result, indices.index(each)) for each in range(count)]
    return answers


def _content(output: Output, at: int) -> Answer:
    headers = {name: str(value) for name, value in output.properties.items()}
    named = [headers.pop(name) for name in tuple(headers) if name.lower() == "content-type"]
    content_type = named[-1] if named else output.content_types[at]
    return Answer(output.content.value_at(at), content_type, output.code, headers)
