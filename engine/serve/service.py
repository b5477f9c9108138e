"""What a server serves: text generation, or another task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.output import Output
from core.part import Feature, Part
from core.protocol.facts import Facts
from core.protocol.messages import FromEngine, NewRequest, Ready
from core.protocol.stats import Receipt
from engine.serve.connection import Inbound
from engine.stopwatch import Stopwatch
from strategies.base import Strategy


class Result(Protocol):
    """The result of a request that generates no tokens."""

    @property
    def request_id(self) -> int: ...

    @property
    def admitted(self) -> float | None:
        """When the strategy admitted the request."""
        ...

    @property
    def has_failed(self) -> bool: ...

    def message(self, id: str) -> FromEngine:
        """Return the message to the client, who knows the request by `id`."""
        ...


class StepEngine(Protocol):
    """An engine that runs requests in steps."""

    facts: Facts
    strategy: Strategy
    features: tuple[Feature, ...]
    model_time: Stopwatch
    num_steps: int
    num_step_sequences: int
    num_step_tokens: int

    def has_work(self) -> bool: ...

    def parts_in_use(self) -> Sequence[Part]:
        """Return the parts of running and waiting requests."""
        ...

    def wake_at(self) -> float | None: ...

    def advance(self, now: float, between: Callable[[], None], /) -> Sequence[Output | Result]:
        """Run a step or two. May call `between` at any time to have messages handled."""
        ...

    def abort(
        self, request_id: int, index: int | None = None, reason: str = "", /
    ) -> Receipt | None:
        """Return what the request has cost, if that ends it and somebody counts that."""
        ...


class Service(Protocol):
    """The requests that an engine takes, and its answers to other messages."""

    @property
    def engine(self) -> StepEngine: ...

    def ready(self) -> Ready:
        """Return the answer to Hello."""
        ...

    def prepares(self, client: bytes, message: NewRequest, arrival: float) -> bool:
        """Begin to prepare a request, if that must precede `add`, and return whether it must.

        It comes back through the inbox, as Prepared. Raises RequestError if it never can run.
        """
        ...

    def add(self, message: NewRequest, now: float, send: Callable[[FromEngine], bool]) -> int:
        """Add a request to the engine and return the engine's id of it.

        send: sends a part of the answer within a step; returns False if the client is gone. Raises
        LongshoreError if the request cannot run.
        """
        ...

    def handle(self, client: bytes, message: Inbound) -> None:
        """Answer a message that is not about a request."""
        ...
