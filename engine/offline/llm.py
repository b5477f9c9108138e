"""Offline inference: the same engine without a server, in the shape of vLLM's `LLM` class.

```python
from engine import LLM, SamplingParams

with LLM(model="models/demo", batching="paged") as llm:
    for answer in llm.generate(["ROMEO:"], SamplingParams(temperature=0.8, max_tokens=40)):
        print(answer.prompt, answer.outputs[0].text)
```
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from tqdm import tqdm

from core.errors import ConfigurationError, EngineUnavailableError, RequestError
from core.hub import from_hub
from core.options import Options, Value, make_options
from core.sampling import SamplingParams
from core.task import choose_task
from core.text.bad_words import with_bad_word_ids
from core.text.chat_template import ChatTemplate
from core.text.template_files import load_chat_template
from core.text.tokenizer import Tokenizer
from engine.build import build_engine
from engine.engine import Engine
from engine.offline.adapters import LoRARequest, LoRARequests, load_requested, one_each
from engine.offline.driver import Driver, OfflineRequest
from engine.offline.outputs import OutputDelta, RequestOutput, output_delta
from engine.offline.prompts import Prompt, TokensPrompt, as_list, encoded
from engine.offline.tasks import EmbeddingRequestOutput, embed
from engine.tasks.build import build_task_engine
from engine.tasks.engine import TaskEngine

SERVICE_OPTIONS = frozenset({
    "model_id", "engine", "entryPoint", "output_formatter", "tgi_compat", "tool_call_parser",
    "job_queue_size", "max_request_size", "predict_timeout", "model_loading_timeout",
    "heartbeat_timeout", "retry_threshold", "http_workers", "enable_stateful_sessions",
    "sessions_path", "sessions_expiration", "local_runtime_api", "install_requirements",
})  # fmt: skip
"""Options of the processes around an engine; without them they would do nothing."""
VLLM_NAMES: Mapping[str, str] = {
    "tensor_parallel_size": "tensor_parallel_degree",
    "max_num_seqs": "max_rolling_batch_size",
    "max_num_batched_tokens": "max_rolling_batch_prefill_tokens",
    "num_gpu_blocks_override": "num_kv_blocks",
    "swap_space": "swap_space_gib",
}
"""vLLM's names of options that LMI, and so this project, calls otherwise."""
Message = Mapping[str, object]


class LLM:
    """A model and an engine in this process.

    Takes every option of serving.properties that concerns the engine, by its name without the
    prefix or by vLLM's, for example `batching="paged", dtype="fp32", num_kv_blocks=40`. For one
    thread at a time. `close`, or leaving a `with` block, gives all memory back.

    Raises ConfigurationError where the model or an option cannot be served.
    """

    def __init__(self, model: str | Path, **options: Value) -> None:
        """model: a directory, or an id of the Hugging Face hub."""
        options = {VLLM_NAMES.get(name, name): value for name, value in options.items()}
        for name in SERVICE_OPTIONS & options.keys():
            raise ConfigurationError(
                f"option '{name}' has no effect without a server; leave it out"
            )
        self.options: Options = make_options(options)
        self._model_dir = _local(model, self.options)
        has_tokenizer = (self._model_dir / "tokenizer.json").is_file()
        self._tokenizer = Tokenizer(self._model_dir) if has_tokenizer else None
        self._driver: Driver | None = None
        self._embedding: TaskEngine | None = None
        task = choose_task(self._model_dir, self.options)
        if task.kind == "pipeline":
            raise ConfigurationError(
                f"LLM generates or embeds, and {task.reason}: serve {task.name} by the container, "
                "or say task='text-generation' or task='text-embedding'"
            )
        if task.kind == "embedding":
            self._embedding = build_task_engine(task, self._model_dir, self.options)
            self.facts = self._embedding.facts
        else:
            self._driver = Driver(build_engine(self._model_dir, self.options))
            self.facts = self._driver.engine.facts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, batched as the strategy says; results in the order of prompts.

        lora_request: the adapter of all prompts, or of each; needs option enable_lora.

        Raises RequestError if one of them cannot run (none is run then), GenerationError if one
        fails while it runs.
        """
        requests = self._requests(prompts, sampling_params, lora_request)
        num_answers = sum(request.params.n for request in requests)
        with tqdm(total=num_answers, desc="Answers", disable=not use_tqdm) as bar:
            for _, news in self._generating.run(requests):
                bar.update(news.finish is not None)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several: `generate` after `apply_chat_template`."""
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        prompts = [
            self.apply_chat_template(
                each,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> Iterator[OutputDelta]:
        """The answers to all prompts as they come; the texts of each in order are its text.

        Nothing is computed but while it is iterated over. Closing it, as leaving the loop does,
        ends what still runs. Raises what `generate` raises.
        """
        requests = self._requests(prompts, sampling_params, lora_request)
        for request, news in self._generating.run(requests):
            yield output_delta(request.number, news, request.params, self._tokenizer)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> TokensPrompt:
        """The prompt that a conversation makes by the model's template, or option chat_template.

        Raises RequestError where the template refuses it, or where there is none.
        """
        if self._template is None or self._tokenizer is None:
            raise RequestError("messages", "the model has no chat template; set chat_template")
        text = self._template.render(
            messages,
            tools=tools or (),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

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
        if self._driver is not None:
            raise RequestError("prompts", "the model generates text; LLM(task='text-embedding')")
        if self._embedding is None:
            raise EngineUnavailableError("this LLM is closed; make another")
        limit = self.facts.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        return embed(self._embedding, as_list(prompts), limit, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Drops the model and all KV memory; may be repeated. Nothing can be generated after."""
        self._embedding = None
        if self._driver is not None:
            self._driver.close()
        gc.collect()  # modules of transformers refer to themselves
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _generating(self) -> Driver:
        """Raises RequestError where the model is for something else."""
        if self._driver is None:
            raise RequestError("prompts", f"the task is {self.facts.task}: call embed")
        return self._driver

    @property
    def _engine(self) -> Engine:
        return self._generating.engine

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return load_chat_template(self._model_dir, self.options.chat_template)

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
    ) -> list[OfflineRequest]:
        all_prompts = as_list(prompts)
        all_params = _one_each(sampling_params, len(all_prompts))
        adapters = one_each(lora_request, len(all_prompts))
        load_requested(self._engine, adapters)
        return [
            self._request(number, *each)
            for number, each in enumerate(zip(all_prompts, all_params, adapters, strict=True))
        ]

    def _request(
        self, number: int, prompt: Prompt, params: SamplingParams, adapter: LoRARequest | None
    ) -> OfflineRequest:
        if self._tokenizer is not None:
            params = with_bad_word_ids(params, self._tokenizer)
        elif params.stop:
            raise RequestError("stop", "needs the model's tokenizer.json")
        text, token_ids = encoded(prompt, self._tokenizer)
        kept = list(params.truncated(token_ids, self.facts.max_model_len))
        name = adapter.key if adapter else ""
        return OfflineRequest(number, text, kept, params, self._tokenizer, name)


def _local(model: str | Path, options: Options) -> Path:
    path = Path(model).expanduser()
    if not path.is_dir():
        return from_hub(str(model), options, given_as="model", local=path)
    if options.revision is not None:
        raise ConfigurationError(f"option 'revision' has no effect on the directory {path}")
    return path


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"{len(params)} given for {count} prompts")
    return list(params)
