"""Offline inference: the same engine without a server, in the shape of vLLM's `LLM` class.

```python
from engine import LLM, SamplingParams

llm = LLM(model="models/demo", batching="paged")
for answer in llm.generate(["ROMEO:"], SamplingParams(temperature=0.8, max_tokens=40)):
    print(answer.prompt, answer.outputs[0].text)
```
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from core.errors import ConfigurationError, GenerationError, RequestError
from core.options import Options, Value, make_options
from core.plan import Output
from core.sampling import Finish, SamplingParams
from core.text.answer import Answer
from core.text.tokenizer import Tokenizer
from engine.build import build_engine

SERVICE_OPTIONS = frozenset({
    "model_id", "revision", "engine", "entryPoint", "output_formatter", "job_queue_size",
    "max_request_size", "predict_timeout", "model_loading_timeout", "heartbeat_timeout",
    "retry_threshold", "http_workers",
})  # fmt: skip
"""Options of the processes around an engine; without them they would do nothing."""
Prompt = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    """Of each generated token under the unfiltered model, in nats."""
    finish_reason: str
    """`stop` (end-of-sequence token or stop text) or `length`, as in vLLM and OpenAI."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its answers."""

    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` of them; with `best_of` the best first."""


class LLM:
    """A model and an engine in this process.

    Takes every option of serving.properties that concerns the engine, by its name without the
    prefix, for example `batching="paged", dtype="fp32", num_kv_blocks=40`. Raises
    ConfigurationError where the model or an option cannot be served.
    """

    def __init__(self, model: str | Path, **options: Value) -> None:
        model_dir = Path(model)
        for name in SERVICE_OPTIONS & options.keys():
            raise ConfigurationError(
                f"option '{name}' has no effect without a server; leave it out"
            )
        self.options: Options = make_options(options)
        has_tokenizer = (model_dir / "tokenizer.json").is_file()
        self._tokenizer = Tokenizer(model_dir) if has_tokenizer else None
        self._engine = build_engine(model_dir, self.options)
        self.facts = self._engine.facts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers all prompts, batched as the strategy says; results in the order of prompts.

        Raises RequestError if one of them cannot run (none is run then), GenerationError if one
        fails while it runs.
        """
        all_prompts = _as_list(prompts)
        all_params = _one_each(sampling_params, len(all_prompts))
        answers: dict[int, _Pending] = {}
        try:
            for prompt, params in zip(all_prompts, all_params, strict=True):
                pending = self._pending(prompt, params)
                answers[self._engine.add(pending.token_ids, params, time.monotonic())] = pending
            self._run(answers, use_tqdm)
        finally:
            for request_id in answers:
                self._engine.abort(request_id)
        return [pending.result() for pending in answers.values()]

    def _run(self, answers: dict[int, _Pending], use_tqdm: bool) -> None:
        num_answers = sum(pending.num_open for pending in answers.values())
        with tqdm(total=num_answers, desc="Answers", disable=not use_tqdm) as bar:
            while self._engine.has_work():
                outputs = self._engine.step(time.monotonic())
                for output in outputs:
                    pending = answers[output.request_id]
                    if output.finish == Finish.ERROR:
                        raise GenerationError(self._engine.last_failure)
                    if pending.take(output):
                        bar.update()
                    if pending.stopped_by_text(output):
                        self._engine.abort(output.request_id, output.index)
                if not outputs:
                    self._wait()

    def _wait(self) -> None:
        """Sleeps until the strategy wants the next step: a gang of `dynamic` may be filling."""
        wake_at = self._engine.strategy.wake_at()
        if wake_at is not None:
            time.sleep(max(0.0, wake_at - time.monotonic()))

    def _pending(self, prompt: Prompt, params: SamplingParams) -> _Pending:
        if not isinstance(prompt, str):
            return _Pending(None, list(prompt), params, self._tokenizer)
        if self._tokenizer is None:
            raise RequestError("prompt", "the model has no tokenizer.json; give token ids")
        return _Pending(prompt, self._tokenizer.encode(prompt), params, self._tokenizer)


class _Pending:
    """A prompt and what has been generated of its answers."""

    def __init__(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        if params.stop and tokenizer is None:
            raise RequestError("stop", "needs the model's tokenizer.json")
        self.prompt = prompt
        self.token_ids = token_ids
        self._completions = [
            _Completion(Answer(tokenizer, token_ids, params.stop_texts) if tokenizer else None)
            for _ in range(params.n)
        ]

    @property
    def num_open(self) -> int:
        return sum(each.finish is None for each in self._completions)

    def take(self, output: Output) -> bool:
        """Whether the answer has ended with it."""
        return self._completions[output.index].take(output)

    def stopped_by_text(self, output: Output) -> bool:
        return output.finish is None and self._completions[output.index].finish is not None

    def result(self) -> RequestOutput:
        outputs = [each.result(index) for index, each in enumerate(self._completions)]
        return RequestOutput(self.prompt, self.token_ids, outputs)


class _Completion:
    """One answer as it grows."""

    def __init__(self, answer: Answer | None) -> None:
        self.finish: Finish | None = None
        self._answer = answer
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    def take(self, output: Output) -> bool:
        """Whether it has ended with these tokens."""
        token_ids, logprobs = output.token_ids, output.logprobs
        self.finish = output.finish
        if self._answer is not None:
            kept = len(self._answer.push(token_ids, logprobs, output.finish))
            token_ids, logprobs = token_ids[:kept], logprobs[:kept]
            self.finish = self._answer.finish
        self._token_ids += token_ids
        self._logprobs += logprobs
        return self.finish is not None

    def result(self, index: int) -> CompletionOutput:
        assert self.finish is not None
        reason = "length" if self.finish == Finish.LENGTH else "stop"
        text = self._answer.text if self._answer is not None else ""
        return CompletionOutput(index, text, self._token_ids, self._logprobs, reason)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also where one was given: a text, or a list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(each, int) for each in prompts):
        return [prompts]  # pyright: ignore[reportReturnType] - token ids of one prompt
    return list(prompts)  # pyright: ignore[reportReturnType, reportArgumentType]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"{len(params)} given for {count} prompts")
    return list(params)
