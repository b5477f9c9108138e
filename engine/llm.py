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
from core.sampling import MAX_LOGPROBS, Finish, SamplingParams, TopLogprobs
from core.task import choose_task
from core.text.answer import Answer
from core.text.bad_words import with_bad_word_ids
from core.text.tokenizer import Tokenizer
from engine.build import build_engine
from engine.engine import Engine
from engine.tasks.build import build_task_engine
from engine.tasks.engine import TaskEngine
from engine.tasks.offline import EmbeddingRequestOutput, embed

SERVICE_OPTIONS = frozenset({
    "model_id", "revision", "engine", "entryPoint", "output_formatter", "job_queue_size",
    "max_request_size", "predict_timeout", "model_loading_timeout", "heartbeat_timeout",
    "retry_threshold", "http_workers", "install_requirements",
})  # fmt: skip
"""Options of the processes around an engine; without them they would do nothing."""
Prompt = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token that stands in a place, or might have."""

    logprob: float
    """Under the unfiltered model, in nats."""
    rank: int
    """1 is the most likely token."""
    decoded_token: str | None
    """None without a tokenizer."""


Logprobs = dict[int, Logprob]
"""By token id: the token in a place and the most likely ones there."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    """Of all generated tokens under the unfiltered model, in nats."""
    logprobs: list[Logprobs] | None
    """Of each generated token, where `SamplingParams.logprobs` is set."""
    finish_reason: str
    """`stop` (end-of-sequence token or stop text) or `length`, as in vLLM and OpenAI."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its answers."""

    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    """After `SamplingParams.truncate_prompt_tokens`."""
    outputs: list[CompletionOutput]
    """`n` of them; with `best_of` the best first."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """Of each prompt token, where `SamplingParams.prompt_logprobs` is set; None for the first."""


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
        task = choose_task(model_dir, self.options)
        if task.kind == "pipeline":
            raise ConfigurationError(
                f"LLM generates or embeds, and {task.reason}: serve {task.name} by the container, "
                "or say task='text-generation' or task='text-embedding'"
            )
        self._embedding: TaskEngine | None = None
        if task.kind == "embedding":
            self._embedding = build_task_engine(task, model_dir, self.options)
            self.facts = self._embedding.facts
        else:
            self._generation = build_engine(model_dir, self.options)
            self.facts = self._generation.facts

    @property
    def _engine(self) -> Engine:
        if self._embedding is not None:
            raise RequestError("prompts", f"the task is {self.facts.task}: call embed")
        return self._generation

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
                request_id = self._engine.add(pending.token_ids, pending.params, time.monotonic())
                answers[request_id] = pending
            self._run(answers, use_tqdm)
        finally:
            for request_id in answers:
                self._engine.abort(request_id)
        return [pending.result() for pending in answers.values()]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of all prompts, which are refused where they are too long, unless
        `truncate_prompt_tokens` cuts them (-1: after as many tokens as the model takes).

        Raises RequestError if one of them cannot be embedded, or the model is not for it;
        GenerationError if one fails.
        """
        if self._embedding is None:
            raise RequestError("prompts", "the model generates text; LLM(task='text-embedding')")
        limit = self.facts.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        return embed(self._embedding, _as_list(prompts), limit, use_tqdm=use_tqdm)

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
        if self._tokenizer is not None:
            params = with_bad_word_ids(params, self._tokenizer)
        if not isinstance(prompt, str):
            text, token_ids = None, list(prompt)
        elif self._tokenizer is not None:
            text, token_ids = prompt, self._tokenizer.encode(prompt)
        else:
            raise RequestError("prompt", "the model has no tokenizer.json; give token ids")
        kept = params.truncated(token_ids, self.facts.max_model_len)
        return _Pending(text, list(kept), params, self._tokenizer)


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
        self.token_ids = token_ids
        self.params = params
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._completions = [_Completion(params, token_ids, tokenizer) for _ in range(params.n)]
        self._prompt_scores: list[TopLogprobs] = []

    @property
    def num_open(self) -> int:
        return sum(each.finish is None for each in self._completions)

    def take(self, output: Output) -> bool:
        """Whether the answer has ended with it."""
        self._prompt_scores += output.prompt
        return self._completions[output.index].take(output)

    def stopped_by_text(self, output: Output) -> bool:
        return output.finish is None and self._completions[output.index].finish is not None

    def result(self) -> RequestOutput:
        outputs = [each.result(index) for index, each in enumerate(self._completions)]
        scores: list[Logprobs | None] | None = None
        if self.params.prompt_logprobs is not None:
            scores = [None, *_named(self.token_ids[1:], self._prompt_scores, self._tokenizer)]
        return RequestOutput(self._prompt, self.token_ids, outputs, scores)


class _Completion:
    """One answer as it grows."""

    def __init__(
        self, params: SamplingParams, prompt_token_ids: list[int], tokenizer: Tokenizer | None
    ) -> None:
        self.finish: Finish | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._answer = Answer.of(params, tokenizer, prompt_token_ids) if tokenizer else None
        self._token_ids: list[int] = []
        self._cumulative_logprob = 0.0
        self._top: list[TopLogprobs] = []

    def take(self, output: Output) -> bool:
        """Whether it has ended with these tokens."""
        kept = len(output.token_ids)
        self.finish = output.finish
        if self._answer is not None:
            kept = len(self._answer.push(output.token_ids, output.logprobs, output.finish))
            self.finish = self._answer.finish
        self._token_ids += output.token_ids[:kept]
        self._cumulative_logprob += sum(output.logprobs[:kept])
        self._top += output.top[:kept]
        return self.finish is not None

    def result(self, index: int) -> CompletionOutput:
        assert self.finish is not None
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self._answer.text if self._answer is not None else "",
            token_ids=self._token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=_named(self._token_ids, self._top, self._tokenizer)
            if wants_logprobs
            else None,
            finish_reason="length" if self.finish == Finish.LENGTH else "stop",
        )


def _named(
    token_ids: list[int], top: list[TopLogprobs], tokenizer: Tokenizer | None
) -> list[Logprobs]:
    """The token of each place first, then the others by rank."""
    named: list[Logprobs] = []
    for token_id, best in zip(token_ids, top, strict=True):
        ranked = [(token_id, best.logprob, best.rank)]
        ranked += zip(best.token_ids, best.logprobs, range(1, MAX_LOGPROBS + 1), strict=False)
        named.append(
            {
                id: Logprob(logprob, rank, tokenizer.decode([id]) if tokenizer else None)
                for id, logprob, rank in ranked
            }
        )
    return named


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
