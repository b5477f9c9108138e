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

from core.adapter import Adapted, Adapter, adapter_of, lora_disabled
from core.configuration.limits import IMAGES_IN_USE
from core.errors import EngineUnavailableError, OverloadedError, RequestError
from core.foreign_code import contained, reason_of
from core.images import Images, PromptImage
from core.output import Output
from core.part import Part
from core.plan import StepPlan
from core.protocol.messages import Facts
from core.request import Request
from core.request_check import checked
from core.sampling import MAX_SEED, SamplingParams
from engine.device import is_out_of_memory
from engine.executor import Executor, SubmittedStep
from engine.failures import Guard
from engine.sampling.grammars import Constrained, Grammars
from engine.sampling.ngrams import WithoutRepeats
from engine.scores.part import ScoredPrompt
from engine.stopwatch import Stopwatch
from strategies.base import Strategy

if TYPE_CHECKING:
    from engine.lora.adapter_registry import AdapterRegistry

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
        grammars: Grammars | None = None,
        adapters: AdapterRegistry | None = None,
        model_time: Stopwatch | None = None,
    ) -> None:
        """overlaps: schedule a step before the one in flight is committed.

        grammars: the executor's; if None, requests with `structured_outputs` are rejected.
        model_time: the executor's; if None, nothing is timed.
        """
        self.strategy = strategy
        self._guard = Guard(strategy)
        self.facts = facts
        self.grammars = grammars
        self.adapters = adapters
        """None where `option.enable_lora` is false."""
        self.executor = executor
        self.overlaps = overlaps
        self.model_time = model_time or Stopwatch()
        """Runs while the model computes on the CPU, or the engine waits for another device."""
        self.close: Callable[[], None] = lambda: None
        """Ends the processes that share the model; may be called again."""
        self._in_flight: tuple[StepPlan, SubmittedStep] | None = None
        """The step that was submitted but not yet committed; always None without `overlaps`."""
        self._next_id = 0
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
        adapter: str = "",
        images: tuple[PromptImage, ...] = (),
    ) -> int:
        """Add a request and return its id. A new grammar is compiled first, in this thread.

        adapter: the name of a LoRA adapter, or '' for none. images: the prompt's images, in the
        order of their positions.

        Raises RequestError if the request can never run, NotFoundError if the adapter is not
        loaded, OverloadedError if the grammars or the images in use are too large and
        GenerationError if the strategy fails. A call that raises changes nothing.
        """
        chosen = self._find_adapter(adapter) if adapter else None
        # The front end has truncated and checked its prompts already; `LLM` has not.
        prompt_token_ids = params.truncated(prompt_token_ids, self.facts.max_model_len)
        params = checked(prompt_token_ids, params, self.facts, images)
        if params.structured_outputs is not None and self.grammars is None:
            raise RequestError("structured_outputs", "this engine does not support it")
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbelow(MAX_SEED))
        if images:
            self._check_room_for(images)
        request = Request(
            self._next_id,
            prompt_token_ids,
            params,
            arrival=now,
            eos_token_ids=self.facts.eos_token_ids,
            parts=request_parts(params, len(prompt_token_ids), chosen, images),
        )
        if self.grammars is not None and params.structured_outputs is not None:
            self.grammars.hold(request.sequences)
        if not self._guard.add(request):
            raise RequestError(
                "num_beams",
                f"{params.beam_width} beams of {request.sequences[0].max_length} tokens do not "
                "fit into the KV cache or the token budget of a step",
            )
        self._next_id += len(request.sequence_ids)
        return request.id

    def abort(self, request_id: int, index: int | None = None) -> None:
        """End a request, or only its answer `index`. It gets no further output.

        Unknown ids are ignored.
        """
        self._guard.abort(request_id, index)

    def adapter_slots_in_use(self) -> set[int]:
        """Return the adapter slots of running and waiting requests.

        Other slots may be overwritten even while a step is in flight: the device runs the copy
        after that step.
        """
        groups = (*self.strategy.running, *self.strategy.waiting)
        adapters = (adapter_of(group.request.parts) for group in groups)
        return {adapter.slot for adapter in adapters if adapter is not None}

    def has_work(self) -> bool:
        is_busy = self.strategy.has_work() or self._in_flight is not None
        return is_busy or self._guard.has_outputs()

    def wake_at(self) -> float | None:
        """Return when to call `step` if nothing runs; None: at once, or when a request arrives."""
        return self._guard.wake_at()

    def step(self, now: float, between_tokens: Callable[[], None] = lambda: None) -> list[Output]:
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
        plan = self._guard.schedule(now)
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
            submitted, self._in_flight = self._in_flight, submitted
        outputs = [] if submitted is None else self._commit(*submitted)
        return outputs + self._guard.take_outputs()

    def _commit(self, plan: StepPlan, step: SubmittedStep) -> list[Output]:
        try:
            with contained:
                result = step.wait()
        except Exception as error:
            self._fail(plan, error)
            return []
        self._num_failed_steps = 0
        return self._guard.commit(plan, result)

    def _fail_submit(self, plan: StepPlan, error: Exception) -> None:
        """Handle a step that could not be submitted. Call from within an `except` block."""
        if isinstance(error, EngineUnavailableError):  # another process of the model is lost
            raise error
        num_sequences = len(plan.chunks)
        if num_sequences < 2 or not is_out_of_memory(error):
            self._fail(plan, error)
            return
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

    def _find_adapter(self, name: str) -> Adapter:
        if self.adapters is None:
            raise lora_disabled()
        return self.adapters.find(name)

    def _check_room_for(self, images: tuple[PromptImage, ...]) -> None:
        groups = (*self.strategy.running, *self.strategy.waiting)
        held = {group.request.id: Images.of(group.request.parts) for group in groups}
        parts = (*filter(None, held.values()), Images(images))
        if sum(part.num_bytes for part in parts) > IMAGES_IN_USE.maximum:
            raise OverloadedError(f"the images in use have more than {IMAGES_IN_USE.maximum} bytes")


def request_parts(
    params: SamplingParams,
    num_prompt_tokens: int,
    adapter: Adapter | None = None,
    images: tuple[PromptImage, ...] = (),
) -> tuple[Part, ...]:
    """Return the parts of a request's sequences: one for each feature that it uses."""
    parts: list[Part] = []
    if adapter is not None:
        parts.append(Adapted(adapter))
    if images:
        parts.append(Images(images))
    if params.prompt_logprobs is not None:
        parts.append(ScoredPrompt(num_prompt_tokens))
    if params.structured_outputs is not None:
        parts.append(Constrained())
    if params.no_repeat_ngram_size:
        parts.append(WithoutRepeats())
    return tuple(parts)
