"""The figures of a request, collected for its log line and its spans."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from container.http.failures import Failure
from core.output import Output
from core.protocol.messages import Submit
from core.protocol.stats import Receipt, Timing
from core.sampling import Finish, Operation, SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """The figures of one HTTP request. Times are seconds of the monotonic clock."""

    now: Callable[[], float] = time.monotonic
    failure: Failure | None = None
    """Why the request failed, even if its response had begun with another status."""
    operation: Operation | None = None
    """None if the request generates no text."""
    variant: str = ""
    """Name of the model's variant that the request uses; '' for the model itself."""
    params: SamplingParams | None = None
    """The sampling parameters of the last prompt that was sent to the engine."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Generated tokens of all answers."""
    finishes: list[Finish] = field(default_factory=list[Finish])
    """Why each returned answer ended, except for aborted answers."""
    submitted: float | None = None
    """When the first prompt was sent to the engine."""
    admitted: float | None = None
    """When the engine began with the first sequence."""
    first_token: float | None = None
    """When the first token reached this process."""
    ended: float | None = None
    """When this process learned that the engine had stopped working on the last prompt."""
    timing: Timing | None = None
    """The engine's times from the first arrival to the last end, once it has sent the times of all
    answers. It sends no times for an answer that a stop string or an abort ends."""
    receipt: Receipt | None = None
    """What the engine's requests have cost, as far as it has said."""
    began: float = field(init=False)
    _timings: list[Timing] = field(default_factory=list[Timing], init=False)
    _num_answers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.began = self.now()

    def submit(self, operation: Operation, request: Submit, submitted: float) -> None:
        """Note that a prompt was sent to the engine. submitted: the time just before sending it."""
        self.operation, self.variant, self.params = operation, request.variant, request.params
        self.prompt_tokens += len(request.prompt_token_ids)
        self._num_answers += request.params.num_answers
        if self.submitted is None:
            self.submitted = submitted

    def add(self, output: Output) -> None:
        """Count the tokens of an output."""
        self.tokens += len(output.token_ids)
        if self.admitted is None:
            self.admitted = output.admitted
        if self.first_token is None and output.token_ids:
            self.first_token = self.now()
        if output.timing is not None:
            self._add_timing(output.timing)
        if output.receipt is not None:
            self.charge(output.receipt)

    def charge(self, receipt: Receipt) -> None:
        """Add what one of the engine's requests has cost."""
        self.receipt = self.receipt or Receipt()
        self.receipt.add(receipt)

    def end(self, finishes: list[Finish]) -> None:
        """Note that the engine has stopped working on a prompt, and why its answers ended."""
        self.finishes += finishes
        self.ended = self.now()

    def _add_timing(self, timing: Timing) -> None:
        self._timings.append(timing)
        if len(self._timings) == self._num_answers:
            self.timing = Timing(
                arrived=min(timing.arrived for timing in self._timings),
                admitted=min(timing.admitted for timing in self._timings),
                first_token=min(timing.first_token for timing in self._timings),
                finished=max(timing.finished for timing in self._timings),
            )
