"""The engine: a strategy, an executor, and the three lines between them."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import msgspec

from core.errors import RequestError
from core.messages import Facts
from core.plan import Output
from core.sampling import MAX_SEED, SamplingParams
from core.sequence import Sequence
from engine.executor import Executor
from strategies.base import Strategy

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps that fail in a row before the engine gives up: the device, not a request, is at fault."""


class Engine:
    """Owned by one loop; not thread-safe. Time is an argument, so a test can drive it."""

    def __init__(self, strategy: Strategy, executor: Executor, facts: Facts) -> None:
        self.strategy = strategy
        self.facts = facts
        self.last_failure = ""
        """Why the newest Output with Finish.ERROR failed."""
        self._executor = executor
        self._ids = itertools.count()
        self._num_failed_steps = 0

    def add(self, prompt_token_ids: Tokens[int], params: SamplingParams, now: float) -> int:
        """Accepts a request and returns its sequence id.

        Raises RequestError for what can never run; nothing is changed then.
        """
        self._check(prompt_token_ids, params)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbelow(MAX_SEED))
        sequence = Sequence(
            next(self._ids),
            prompt_token_ids,
            params,
            arrival=now,
            eos_token_ids=self.facts.eos_token_ids,
        )
        self.strategy.add(sequence)
        return sequence.id

    def abort(self, sequence_id: int) -> None:
        """Nothing more is heard of it. Unknown and ended ids are no error."""
        self.strategy.abort(sequence_id)

    def has_work(self) -> bool:
        return self.strategy.has_work()

    def step(self, now: float, between_tokens: Callable[[], None] = lambda: None) -> list[Output]:
        """One run of the executor, if there is something to compute now.

        `between_tokens` may call `add` and `abort`; the library executor calls it in long runs.

        A step that fails ends its sequences with Finish.ERROR. Raises what the executor raised
        once that has happened MAX_FAILED_STEPS times in a row.
        """
        plan = self.strategy.schedule(now)
        if plan is None:
            return []
        try:
            result = self._executor.run(plan, between_tokens)
        except Exception as error:
            logger.exception("step failed num_sequences=%d", len(plan.chunks))
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise
            self.last_failure = f"{type(error).__name__}: {error}"
            return self.strategy.fail(plan)
        self._num_failed_steps = 0
        return self.strategy.commit(plan, result)

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
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < self.facts.vocab_size:
            raise RequestError("prompt", f"token ids must be 0 to {self.facts.vocab_size - 1}")
