"""The engine: a strategy that schedules steps and an executor that runs them.

Without overlap, a step is scheduled, submitted, waited for and committed. With overlap (vLLM's
asynchronous scheduling), the next step is scheduled and submitted before the engine waits for this
one, so that the device does not idle while the host schedules:

```
host     schedule 2 | submit 2 | wait 1 | commit 1 | schedule 3 | submit 3 | wait 2 ...
device   ======= step 1 ========|========= step 2 ==========|========= step 3 ...
```
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import msgspec

from core.errors import EngineUnavailableError, RequestError
from core.foreign_code import contained, reason_of
from core.output import Output
from core.part import Feature, Part
from core.plan import StepPlan
from core.protocol.facts import Facts
from core.request import Request
from core.request_check import checked
from core.sampling import MAX_SEED, SamplingParams
from engine.device import is_out_of_memory
from engine.executor import Executor, Observer, SubmittedStep
from engine.failures import Guard
from engine.stopwatch import Stopwatch
from strategies.base import Strategy

if TYPE_CHECKING:
    from core.protocol.stats import Receipt
    from strategies.factory import StrategySettings

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Consecutive failed steps after which the engine gives up: the device is at fault, not a
request."""


class Engine:
    """Adds and aborts requests, and runs steps. Not thread-safe.

    Callers pass the current time as `now`, so that tests can set it.
    """

    def __init__(
        self,
        strategy: Strategy,
        executor: Executor,
        facts: Facts,
        *,
        overlaps: bool = False,
        features: tuple[Feature, ...] = (),
        model_time: Stopwatch | None = None,
        settings: StrategySettings | None = None,
    ) -> None:
        """overlaps: schedule a step before the one in flight is committed.

        features: what requests may use; the executor must know the parts that they make.
        model_time: the executor's; if None, nothing is timed. settings: those of the strategy.
        """
        self.strategy = strategy
        self.settings = settings
        self._guard = Guard(strategy)
        self.facts = facts
        self.features = features
        self.executor = executor
        self.overlaps = overlaps
        self.model_time = model_time or Stopwatch()
        """Runs while the model computes on the CPU, or the engine waits for another device."""
        self.observer = Observer()
        """Sees all requests and steps."""
        self.close: Callable[[], None] = lambda: None
        """Ends the processes that share the model; may be called again."""
        self.in_flight: tuple[StepPlan, SubmittedStep] | None = None
        """The step that was submitted but not yet committed; always None without `overlaps`."""
        self.next_id = 0
        """The id of the next request."""
        self.num_steps = 0
        """Steps scheduled since the start. The next two fields are totals over these steps."""
        self.num_step_sequences = 0
        self.num_step_tokens = 0
        self._num_failed_steps = 0

    def add(
        self,
        prompt_token_ids: Tokens[int],
        params: SamplingParams,
        now: float,
        parts: tuple[Part, ...] = (),
    ) -> int:
        """Add a request and return its id. The features that it uses are prepared first.

        parts: those of features that the sampling parameters do not name.

        Raises RequestError if the request can never run, OverloadedError if what it uses is too
        large beside what others use and GenerationError if the strategy fails. A call that raises
        changes nothing.
        """
        # The front end has truncated and checked its prompts already; `LLM` has not.
        prompt_token_ids = params.truncated(prompt_token_ids, self.facts.max_model_len)
        params = checked(prompt_token_ids, params, self.facts)
        if params.seed is None and not params.is_greedy:
            params = msgspec.structs.replace(params, seed=secrets.randbelow(MAX_SEED))
        changed = set(params.changed)
        used = (each for each in self.features if not changed.isdisjoint(each.fields))
        made = [feature.part(params, len(prompt_token_ids)) for feature in used]
        request = Request(
            self.next_id,
            prompt_token_ids,
            params,
            arrival=now,
            eos_token_ids=self.facts.eos_token_ids,
            parts=(*parts, *(part for part in made if part is not None)),
        )
        if not self._guard.add(request):
            raise _does_not_fit(request)
        self.next_id += len(request.sequence_ids)
        self.observer.added(request)
        return request.id

    def abort(self, request_id: int, index: int | None = None, reason: str = "") -> Receipt | None:
        """End a request, or only its answer `index`. It gets no further output.

        Unknown ids are ignored. reason: for the observer, whose receipt is returned.
        """
        self._guard.abort(request_id, index)
        return self.observer.aborted(request_id, index, reason)

    def parts_in_use(self) -> list[Part]:
        """Return the parts of running and waiting requests."""
        groups = (*self.strategy.running, *self.strategy.waiting)
        requests = {group.request.id: group.request for group in groups}
        return [part for request in requests.values() for part in request.parts]

    def has_work(self) -> bool:
        is_busy = self.strategy.has_work() or self.in_flight is not None
        return is_busy or self._guard.has_outputs()

    def wake_at(self) -> float | None:
        """Return when to call `step` if nothing runs; None: at once, or when a request arrives."""
        return self._guard.wake_at()

    def advance(
        self, now: float, between_tokens: Callable[[], None] = lambda: None
    ) -> Tokens[Output]:
        """Run a step. Call it in a loop, in which outputs are handled between two calls.

        With overlap, the device does not idle meanwhile: if the step left nothing in flight, since
        the next one depends on its tokens, that one is submitted now. Else as `step`.
        """
        outputs = self.step(now, between_tokens)
        if outputs and self.overlaps and self.in_flight is None and self.strategy.running:
            outputs = [*outputs, *self.step(now, between_tokens)]
        return outputs

    def step(self, now: float, between_tokens: Callable[[], None] = lambda: None) -> Tokens[Output]:
        """Submit the next step, if anything is scheduled now, and commit the oldest step.

        Without overlap both are the same step; with overlap, the outputs are those of the step
        before. `between_tokens` may call `add` and `abort`; the library executor calls it between
        the tokens of an answer.

        Raises EngineUnavailableError if another process of the model is lost.

        A failed step ends its sequences with Finish.ERROR. After MAX_FAILED_STEPS failures in a
        row, raises the executor's error instead. If memory runs out for a step of several sequences
        that moves no blocks, only the largest request ends. An exception of the strategy ends the
        requests that it belongs to (engine/failures.py).
        """
        submitted = None
        self.observer.begins(now)
        plan = self._guard.schedule(now)
        self.observer.scheduled(plan)
        if plan is not None:
            self.num_steps += 1
            self.num_step_sequences += len(plan.chunks)
            self.num_step_tokens += plan.num_tokens
            try:
                with contained:
                    submitted = plan, self.executor.submit(plan, between_tokens)
            except Exception as error:
                self._fail_submit(plan, error)
        if self.overlaps:
            submitted, self.in_flight = self.in_flight, submitted
        outputs = [] if submitted is None else self._commit(*submitted)
        outputs += self._guard.take_outputs()
        return self.observer.ends(outputs)

    def _commit(self, plan: StepPlan, step: SubmittedStep) -> list[Output]:
        try:
            with contained:
                result = step.wait()
        except Exception as error:
            self.observer.failed(plan, "wait")
            self._fail(plan, error)
            return []
        self._num_failed_steps = 0
        self.observer.computed(plan, result)
        return self._guard.commit(plan, result)

    def _fail_submit(self, plan: StepPlan, error: Exception) -> None:
        """Handle a step that could not be submitted. Call from within an `except` block."""
        if isinstance(error, EngineUnavailableError):  # another process of the model is lost
            raise error
        num_sequences = len(plan.chunks)
        if num_sequences < 2 or not is_out_of_memory(error):
            self.observer.failed(plan, "submit")
            self._fail(plan, error)
            return
        self.observer.failed(plan, "memory")
        logger.exception("step out of memory num_sequences=%d, the largest one ends", num_sequences)
        reason = f"out of memory in a step of {num_sequences} sequences; this one was the largest"
        self._guard.fail_largest(plan, reason)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """End the plan's sequences with Finish.ERROR; after too many failures raise `error`.

        Call from within an `except` block.
        """
        logger.exception("step failed num_sequences=%d", len(plan.chunks))
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise error
        self._guard.fail(plan, reason_of(error))


def _does_not_fit(request: Request) -> RequestError:
    """Return the error for beams that can never run together. Any other request can run."""
    return RequestError(
        "num_beams",
        f"{request.params.beam_width} beams of {request.sequences[0].max_length} tokens do not fit "
        "into the KV cache, the room for states or the token budget of a step; ask for fewer beams "
        "or tokens",
    )
