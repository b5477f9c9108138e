"""What does a task, and how one request's failure stays its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from core.errors import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Answer:
    """What its client gets, as `core.messages.Performed` carries it."""

    body: bytes
    content_type: str = "application/json"
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Job:
    """A request, as `core.messages.Perform` carries it."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    send: Callable[[Answer], bool] = lambda part: False
    """Sends a part of the answer before its end; whether anybody still wants more."""


Outcome = Answer | Exception
"""RequestError: the request is wrong; any other: it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What start-up prints of a performer."""

    architecture: str
    dtype: str = ""
    weights_bytes: int = 0
    max_model_len: int = 0
    notes: tuple[str, ...] = ()


class Performer(Protocol):
    @property
    def description(self) -> Description: ...

    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        """An outcome for each job. Raises only where the device is of no more use.

        Calls `between_runs` now and then, where more than one thing is to be computed.
        """
        ...


def run_apart(
    run: Callable[[list[T]], Sequence[R]], items: list[T], between_runs: Callable[[], None]
) -> list[R | Exception]:
    """`run` of all items at once; where that raises, of each half, and so on.

    So an error costs its neighbours time and nothing else, and a batch too large for the device's
    memory is computed in parts. Raises what says that the device itself has failed.
    """
    try:
        results = list(run(items))
        assert len(results) == len(items), "a result for each item"
        return list(results)
    except torch.AcceleratorError:  # every later call would fail, too
        raise
    except Exception as error:
        if len(items) == 1:
            if not isinstance(error, RequestError):
                logger.warning("task failed", exc_info=error)
            return [error]
    between_runs()
    half = len(items) // 2
    parts = (items[:half], items[half:])
    return [result for part in parts for result in run_apart(run, part, between_runs)]
