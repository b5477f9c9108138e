"""Runs an engine for several callers in one thread, such as two streams in a `zip`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from core.errors import (
    EngineUnavailableError,
    GenerationError,
    LongshoreError,
    RequestError,
)
from core.output import Output
from core.part import Part
from core.sampling import Finish, SamplingParams
from core.text.answers import Delta, answers_to
from core.text.detokenizer import Detokenization
from core.text.tokenizer import Tokenizer
from engine.engine import Engine
from engine.offline.outputs import RequestOutput, request_output


class OfflineRequest:
    """A prompt and its answers so far."""

    def __init__(
        self,
        prompt_index: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        """prompt_index: index among the caller's prompts."""
        self.prompt_index = prompt_index
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.parts = parts
        self.answers = answers_to(Detokenization(params, tokenizer, prompt_token_ids))
        self.id = -1
        """The engine's request id, once submitted."""
        self._prompt = prompt
        self._tokenizer = tokenizer

    def output(self) -> RequestOutput:
        """Return the result. Every answer must have ended."""
        prompt = self._prompt, self.prompt_token_ids
        return request_output(self.id, *prompt, self.answers, self.params, self._tokenizer)


_Deltas = deque[tuple[OfflineRequest, Delta | LongshoreError]]
"""New outputs of one caller's requests that the caller has not taken yet."""


class Driver:
    """Steps an engine and routes each step's outputs to the caller that owns the request."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._running: dict[int, tuple[OfflineRequest, _Deltas]] = {}
        """By the engine's request id."""

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineUnavailableError after `close`."""
        if self._engine is None:
            raise EngineUnavailableError("this LLM is closed; make another")
        return self._engine

    def close(self) -> None:
        """Drop the engine. Callers that are still iterating get EngineUnavailableError."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def run(self, requests: Sequence[OfflineRequest]) -> Iterator[tuple[OfflineRequest, Delta]]:
        """Submit all requests and yield new tokens until every answer has ended.

        Aborts unfinished requests however the generator ends, even if the caller closes it. Raises
        RequestError if a request cannot run (then none does) and GenerationError if one fails.
        """
        deltas: _Deltas = deque()
        try:
            for request in requests:
                request.id = self.engine.add(
                    request.prompt_token_ids, request.params, time.monotonic(), request.parts
                )
                self._running[request.id] = request, deltas
            num_open = sum(request.params.n for request in requests)
            while num_open:
                while not deltas:
                    self._step()
                request, delta = deltas.popleft()
                if isinstance(delta, LongshoreError):
                    raise delta
                num_open -= delta.finish is not None
                yield request, delta
        finally:
            for request in requests:
                is_running = self._running.pop(request.id, None) and request.answers.num_open
                if is_running and self._engine is not None:
                    self._engine.abort(request.id)

    def _step(self) -> None:
        outputs = self.engine.advance(time.monotonic())
        for output in outputs:
            if output.request_id in self._running:
                request, deltas = self._running[output.request_id]
                deltas += ((request, delta) for delta in self._new_deltas(request, output))
        if not outputs:
            self._wait()

    def _new_deltas(
        self, request: OfflineRequest, output: Output
    ) -> Sequence[Delta | LongshoreError]:
        if output.finish == Finish.ERROR:
            return [_error_of(output)]
        deltas = request.answers.push(output)
        if request.answers.is_stopped_by_string(output):
            self.engine.abort(output.request_id, output.index)
        return deltas

    def _wait(self) -> None:
        """Sleep until the strategy's next step is due: `dynamic` may wait to fill a batch."""
        wake_at = self.engine.wake_at()
        if wake_at is not None:
            time.sleep(max(0.0, wake_at - time.monotonic()))


def _error_of(output: Output) -> LongshoreError:
    if output.failed_field:
        return RequestError(output.failed_field, output.failure)
    return GenerationError(output.failure)
