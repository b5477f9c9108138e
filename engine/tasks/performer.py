"""The interface of performers, which perform tasks, and the isolation of failing requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from core.errors import EngineUnavailableError, RequestError
from core.foreign_code import contained
from core.part import Feature, Part
from core.protocol.messages import Performed

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


FATAL = (torch.AcceleratorError, EngineUnavailableError)
"""Errors that end the engine: after the first, every later call would fail too, and `between_runs`
raises the second."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a client, sent as `core.protocol.messages.Performed`."""

    body: bytes
    content_type: str = "application/json"
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def message(self, id: str, *, is_last: bool) -> Performed:
        """Return the message that sends the answer, or one part of it, for the request `id`."""
        return Performed(id, self.body, self.content_type, self.code, dict(self.headers), is_last)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Job:
    """A request, received as `core.protocol.messages.Perform`. Equal only to itself."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    send: Callable[[Answer], bool] = lambda part: False
    """Sends one part of a streamed answer. Returns False if the client wants no more."""
    parts: tuple[Part, ...] = ()
    """What features of the performer's add to it."""


Outcome = Answer | Exception
"""An exception fails the request. A RequestError blames the client; all others blame the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The facts about a performer, most of which start-up prints."""

    architecture: str
    dtype: str = ""
    encoder: str = ""
    """Whose layers compute it, if it is a transformers model."""
    weights_bytes: int = 0
    max_model_len: int = 0
    notes: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    """What requests may use."""


class Performer(Protocol):
    """Performs the jobs of one task: an embedder, a pipeline or a user's handler."""

    @property
    def description(self) -> Description: ...

    def perform(
        self, jobs: Sequence[Job], between_runs: Callable[[], None]
    ) -> Sequence[Outcome | None]:
        """Return one outcome per job, in order. Raises only if the device is no longer usable.

        None: the job is not done, and is to be performed further in the next step, if it is not
        aborted. If it runs the model more than once, it calls `between_runs` between the runs.
        """
        ...


def run_isolated(
    run: Callable[[list[T]], Sequence[R]], items: list[T], between_runs: Callable[[], None]
) -> list[R | Exception]:
    """Run all items at once; if that raises, run each half by itself, recursively.

    So a bad item only delays the others, and a batch too large for the device's memory runs in
    parts. Returns one result or exception per item. Raises the errors in FATAL.
    """
    try:
        with contained:
            results = list(run(items))
        assert len(results) == len(items), "one result per item"
        return list(results)
    except FATAL:
        raise
    except Exception as error:
        if len(items) == 1:
            if not isinstance(error, RequestError):
                logger.warning("task failed", exc_info=error)
            return [error]
    between_runs()
    half = len(items) // 2
    parts = (items[:half], items[half:])
    return [result for part in parts for result in run_isolated(run, part, between_runs)]
