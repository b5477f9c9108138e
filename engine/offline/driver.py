"""Runs an engine for callers in one thread, who may take turns, as two streams in a `zip` do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from core.errors import EngineUnavailableError, GenerationError
from core.plan import Output
from core.sampling import Finish, SamplingParams
from core.text.answers import Answers, News
from core.text.tokenizer import Tokenizer
from engine.engine import Engine
from engine.offline.outputs import RequestOutput, completion_output, prompt_logprobs


class OfflineRequest:
    """A prompt and what has been generated of its answers."""

    def __init__(
        self,
        number: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        adapter: str = "",
    ) -> None:
        """number: which of its caller's prompts; adapter: the name of a loaded one."""
        self.number = number
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.adapter = adapter
        self.answers = Answers(params, tokenizer, prompt_token_ids)
        self.id = -1
        """The engine's, once it runs."""
        self._prompt = prompt
        self._tokenizer = tokenizer

    def output(self) -> RequestOutput:
        """All of it, once every answer has ended."""
        params, scores = self.params, None
        if params.prompt_logprobs is not None:
            told = self.answers.prompt_scores
            scores = prompt_logprobs(self.prompt_token_ids, told, self._tokenizer)
        return RequestOutput(
            request_id=str(self.id),
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[
                completion_output(index, answer, params, self._tokenizer)
                for index, answer in enumerate(self.answers.told)
            ],
            prompt_logprobs=scores,
        )


_Arrivals = deque[tuple[OfflineRequest, News | GenerationError]]
"""What is new of the requests of one caller."""


class Driver:
    """Takes an engine's steps, and hands the news of each to whose requests it is of."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._running: dict[int, tuple[OfflineRequest, _Arrivals]] = {}
        """By the engine's request id."""

    @property
    def engine(self) -> Engine:
        """Raises EngineUnavailableError once closed."""
        if self._engine is None:
            raise EngineUnavailableError("this LLM is closed; make another")
        return self._engine

    def close(self) -> None:
        """Lets go of the engine; whoever still waits for news gets an error."""
        self._engine = None

    def run(self, requests: Sequence[OfflineRequest]) -> Iterator[tuple[OfflineRequest, News]]:
        """Submits all or none, and tells what is new until all have ended.

        Whatever ends it, also that it is closed, leaves nothing running. Raises RequestError for
        what cannot run, GenerationError for what fails.
        """
        arrivals: _Arrivals = deque()
        try:
            for request in requests:
                request.id = self.engine.add(
                    request.prompt_token_ids, request.params, time.monotonic(), request.adapter
                )
                self._running[request.id] = request, arrivals
            num_open = sum(request.params.n for request in requests)
            while num_open:
                while not arrivals:
                    self._step()
                request, news = arrivals.popleft()
                if isinstance(news, GenerationError):
                    raise news
                num_open -= news.finish is not None
                yield request, news
        finally:
            for request in requests:
                if self._running.pop(request.id, None) and self._engine is not None:
                    self._engine.abort(request.id)

    def _step(self) -> None:
        outputs = self.engine.step(time.monotonic())
        for output in outputs:
            if output.request_id in self._running:
                request, arrivals = self._running[output.request_id]
                arrivals += ((request, news) for news in self._news(request, output))
        if not outputs:
            self._wait()

    def _news(self, request: OfflineRequest, output: Output) -> Sequence[News | GenerationError]:
        if output.finish == Finish.ERROR:
            return [GenerationError(output.failure)]
        news = request.answers.push(output)
        if request.answers.stopped_by_text(output):
            self.engine.abort(output.request_id, output.index)
        return news

    def _wait(self) -> None:
        """Sleeps until the strategy wants the next step: a gang of `dynamic` may be filling."""
        wake_at = self.engine.strategy.wake_at()
        if wake_at is not None:
            time.sleep(max(0.0, wake_at - time.monotonic()))
