"""The engine: a strategy, an executor, and the loop between them.

Plain, a step is scheduled, submitted, waited for and committed. Overlapped (vLLM's asynchronous
scheduling), the next step is scheduled and submitted before this one is waited for, so that the
device never idles while the host thinks:

```
host     schedule 2 | submit 2 | wait 1 | commit 1 | schedule 3 | submit 3 | wait 2 ...
device   ======= step 1 ========|========= step 2 ==========|========= step 3 ...
```
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens

import msgspec

from core.adapter import Adapter
from core.errors import RequestError
from core.messages import Facts
from core.plan import Output, StepPlan
from core.request import Request
from core.sampling import MAX_SEED, NO_LIMIT, SamplingParams
from engine.executor import Executor, SubmittedStep
from engine.lora.adapters import Adapters
from engine.sampling.grammars import Grammars
from strategies.base import Strategy

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps that fail in a row before the engine gives up: the device, not a request, is at fault."""


class Engine:
    """Owned by one loop; not thread-safe. Time is an argument, so a test can drive it."""

    def __init__(
        self,
        strategy: Strategy,
        executor: Executor,
        facts: Facts,
        *,
        overlaps: bool = False,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """grammars: the executor's; without them no answer can be constrained."""
        self.strategy = strategy
        self.facts = facts
        self.grammars = grammars
        self.adapters = adapters
        """None where `option.enable_lora` is false."""
        self._executor = executor
        self._overlaps = overlaps
        self._in_flight: tuple[StepPlan, SubmittedStep] | None = None
        """The step that the device computes while the next one is scheduled."""
        self._next_id = 0
        self.num_steps = 0
        """Submitted since the start, like the sums below."""
        self.num_step_sequences = 0
        self.num_step_tokens = 0
        self._num_failed_steps = 0

    def add(
        self, prompt_token_ids: Tokens[int], params: SamplingParams, now: float, adapter: str = ""
    ) -> int:
        """Accepts a request and returns its id. Waits for a grammar that it does not know yet.
        adapter: the name of one, or '' for none.

        Raises RequestError for what can never run, NotFoundError for an adapter that is not
        loaded; nothing is changed then.
        """
        chosen = self._adapter(adapter) if adapter else None
        prompt_token_ids = params.truncated(prompt_token_ids, self.facts.max_model_len)
        params = self._resolved(params, len(prompt_token_ids))
        self._check(prompt_token_ids, params)
        request = Request(
            self._next_id,
            prompt_token_ids,
            params,
            arrival=now,
            eos_token_ids=self.facts.eos_token_ids,
            adapter=chosen,
        )
        if not self.strategy.fits(request):
            raise RequestError(
                "num_beams",
                f"{params.beam_width} beams of {request.sequences[0].max_length} tokens are more "
                "than the KV memory or the token budget of a step holds",
            )
        self.strategy.add(request)
        self._next_id += len(request.sequence_ids)
        return request.id

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Nothing more is heard of it, or of one of its answers. Unknown ids are no error."""
        self.strategy.abort(request_id, index)

    def adapter_slots_in_use(self) -> set[int]:
        """Of requests that run or wait. A step in flight needs none of the others: whatever is
        written into a slot is written after it."""
        groups = (*self.strategy.running, *self.strategy.waiting)
        return {each.request.adapter.slot for each in groups if each.request.adapter}

    def has_work(self) -> bool:
        return self.strategy.has_work() or self._in_flight is not None

    def step(self, now: float, between_tokens: Callable[[], None] = lambda: None) -> list[Output]:
        """Submits the next step, if there is something to compute now, and commits the oldest.

        That is the same step, or where steps overlap the one before, whose outputs are returned.
        `between_tokens` may call `add` and `abort`; the library executor calls it in long runs.

        A step that fails ends its sequences with Finish.ERROR. Raises what the executor raised
        once that has happened MAX_FAILED_STEPS times in a row.
        """
        failed, submitted = self._submit(now, between_tokens)
        if self._overlaps:
            submitted, self._in_flight = self._in_flight, submitted
        return failed if submitted is None else failed + self._commit(*submitted)

    def _submit(
        self, now: float, between_tokens: Callable[[], None]
    ) -> tuple[list[Output], tuple[StepPlan, SubmittedStep] | None]:
        plan = self.strategy.schedule(now)
        if plan is None:
            return [], None
        self.num_steps += 1
        self.num_step_sequences += len(plan.chunks)
        self.num_step_tokens += plan.num_tokens
        try:
            return [], (plan, self._executor.submit(plan, between_tokens))
        except Exception as error:
            return self._fail(plan, error), None

    def _commit(self, plan: StepPlan, step: SubmittedStep) -> list[Output]:
        try:
            result = step.wait()
        except Exception as error:
            return self._fail(plan, error)
        self._num_failed_steps = 0
        return self.strategy.commit(plan, result)

    def _fail(self, plan: StepPlan, error: Exception) -> list[Output]:
        """To be called where the error is handled. Raises it again after too many."""
        logger.exception("step failed num_sequences=%d", len(plan.chunks))
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise error
        return self.strategy.fail(plan, f"{type(error).__name__}: {error}")

    def _adapter(self, name: str) -> Adapter:
        if self.adapters is None:
            raise RequestError("adapters", "needs option.enable_lora=true")
        return self.adapters.find(name)

    def _resolved(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """With what the request has left open."""
        if params.max_tokens == NO_LIMIT:
            room = max(1, params.min_tokens, self.facts.max_model_len - num_prompt)
            params = msgspec.structs.replace(params, max_tokens=room)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbelow(MAX_SEED))
        return params

    def _check(self, prompt_token_ids: Tokens[int], params: SamplingParams) -> None:
        num_prompt, limit = len(prompt_token_ids), self.facts.max_model_len
        if num_prompt == 0:
            raise RequestError("prompt", "must have at least one token")
        if num_prompt >= limit:
            raise RequestError(
                "prompt",
                f"has {num_prompt} tokens; at most {limit - 1} fit (max_model_len {limit})",
            )
        if num_prompt + params.max_tokens > limit:
            raise RequestError(
                "max_tokens",
                f"{params.max_tokens} after a prompt of {num_prompt} tokens is more than "
                f"max_model_len {limit}; at most {limit - num_prompt} fit",
            )
        self._check_token_ids("prompt", prompt_token_ids)
        self._check_token_ids("logit_bias", params.logit_bias)
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        for word in params.bad_words:
            if isinstance(word, str):
                raise RequestError("bad_words", "needs the model's tokenizer.json; give token ids")
            self._check_token_ids("bad_words", word)
        if params.structured_outputs is not None:
            if self.grammars is None:
                raise RequestError("structured_outputs", "this engine has no grammars")
            self.grammars.matcher(params.structured_outputs)
        if params.prompt_logprobs is not None and not self.facts.scores_prompts:
            raise RequestError("prompt_logprobs", "an encoder-decoder model has none")

    def _check_token_ids(self, field: str, token_ids: Iterable[int]) -> None:
        if not all(0 <= token_id < self.facts.vocab_size for token_id in token_ids):
            raise RequestError(field, f"token ids must be 0 to {self.facts.vocab_size - 1}")
