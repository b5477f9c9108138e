"""Offline inference: the engine without a server, with the interface of vLLM's `LLM` class.

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
from typing import TYPE_CHECKING, cast

import torch
from tqdm import tqdm

from core.configuration.hub import from_hub
from core.configuration.options import Options, make_options, owners, vllm_names
from core.configuration.record import Value
from core.configuration.task import choose_task
from core.errors import ConfigurationError, EngineUnavailableError, RequestError
from core.part import Part
from core.sampling import SamplingParams
from core.text.bad_words import with_bad_word_ids
from core.text.tokenizer import Tokenizer
from engine.build import build_engine
from engine.engine import Engine
from engine.offline.driver import Driver, OfflineRequest
from engine.offline.outputs import OutputDelta, RequestOutput, output_delta
from engine.offline.prompts import Prompt, TokensPrompt, as_list, encoded, per_prompt

if TYPE_CHECKING:
    from core.text.chat_template import ChatMessage, ChatTemplate
    from engine.offline.lora_request import LoRARequests, Parted
    from engine.offline.tasks import EmbeddingRequestOutput
    from engine.tasks.engine import TaskEngine

RECORDS = {"model", "strategy", "lora", "speculation", "memory", "execution", "observers"}
"""The records of `Options` that an engine needs. The others concern the server's other processes,
which `LLM` does not start."""


class LLM:
    """A model and an engine in this process. Not thread-safe.

    Takes every option of serving.properties that concerns the engine, by its name without the
    prefix or by vLLM's name, for example `batching="paged", dtype="fp32", num_kv_blocks=40`.
    `close`, or leaving a `with` block, frees all memory.

    Raises ConfigurationError if an option is wrong or the model cannot be served.
    """

    def __init__(self, model: str | Path, *, revision: str | None = None, **options: Value) -> None:
        """model: a directory, a GGUF file, or a model id of the Hugging Face hub; revision: which
        of its."""
        options = {vllm_names().get(name, name): value for name, value in options.items()}
        for name in options:
            if owners().get(name, "model") not in RECORDS:
                raise ConfigurationError(
                    f"option '{name}' has no effect without a server; leave it out"
                )
        self.options: Options = make_options({"revision": revision, **options})
        self._model_dir = _find_model(model, self.options)
        has_tokenizer = (self._model_dir / "tokenizer.json").is_file()
        self._tokenizer = Tokenizer(self._model_dir) if has_tokenizer else None
        self._driver: Driver | None = None
        self.embedding_engine: TaskEngine | None = None
        """Set until `close` if the model's task is embedding. Otherwise see `llm_engine`."""
        task = choose_task(self._model_dir, self.options)
        if task.kind == "pipeline":
            raise ConfigurationError(
                f"LLM only generates or embeds, but {task.reason}: serve {task.name} with the "
                "container, or set task='text-generation' or task='text-embedding'"
            )
        if task.kind == "embedding":
            from engine.tasks.build import build_task_engine

            self.embedding_engine = build_task_engine(task, self._model_dir, self.options)
            self.facts = self.embedding_engine.facts
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
        """Answer all prompts, in batches that the strategy forms. Return results in prompt order.

        lora_request: one adapter for all prompts, or one per prompt; needs option enable_lora.

        Raises RequestError if a prompt cannot run (then none does) and GenerationError if one fails
        while it runs.
        """
        requests = self._requests(prompts, sampling_params, lora_request)
        num_answers = sum(request.params.n for request in requests)
        with tqdm(total=num_answers, desc="Answers", disable=not use_tqdm) as bar:
            for _, delta in self._generation_driver.run(requests):
                bar.update(delta.finish is not None)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: `apply_chat_template`, then `generate`."""
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[ChatMessage]]", [messages] if is_one else messages)
        prompts = [
            self.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> Iterator[OutputDelta]:
        """Yield new tokens of the answers to all prompts as they are generated.

        The engine only runs while the caller iterates. Closing the generator, as leaving the loop
        does, aborts the remaining answers. Raises what `generate` raises.
        """
        requests = self._requests(prompts, sampling_params, lora_request)
        for request, delta in self._generation_driver.run(requests):
            yield output_delta(request.prompt_index, delta, request.params, self._tokenizer)

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> TokensPrompt:
        """Render a conversation with the model's chat template, or with option chat_template.

        Raises RequestError if there is no template, it rejects the conversation, or the
        conversation has images, which only a server takes.
        """
        if self._template is None or self._tokenizer is None:
            raise RequestError("messages", "the model has no chat template; set chat_template")
        if any(_is_not_text(part) for message in messages for part in _parts(message)):
            raise RequestError("messages", "offline, only text is supported; images need a server")
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
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of all prompts, in their order.

        truncate_prompt_tokens: cut prompts to this many tokens; -1: to the model's limit. If None,
        prompts that are too long are rejected.
        lora_request: one adapter for all prompts, or one per prompt; needs option enable_lora.

        Raises RequestError if a prompt cannot be embedded or the model is not an embedding
        model, and GenerationError if a prompt fails.
        """
        if self._driver is not None:
            raise RequestError(
                "prompts", "the model generates text; to embed, set task='text-embedding'"
            )
        if self.embedding_engine is None:
            raise EngineUnavailableError("this LLM is closed; make another")
        from engine.offline.tasks import embed

        limit = self.facts.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        engine, all_prompts = self.embedding_engine, as_list(prompts)
        parts = _parts_of(engine, lora_request, len(all_prompts))
        return embed(engine, all_prompts, parts, limit, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Free the model and the KV cache. May be called again.

        Nothing can be generated or embedded after it.
        """
        self.embedding_engine = None
        if self._driver is not None:
            self._driver.close()
        gc.collect()  # modules of transformers have reference cycles
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def llm_engine(self) -> Engine:
        """The engine that runs this model's steps, under vLLM's name.

        Raises RequestError if the model's task is not generation and EngineUnavailableError once
        closed.
        """
        return self._generation_driver.engine

    @property
    def _generation_driver(self) -> Driver:
        """Raises RequestError if the model's task is not generation."""
        if self._driver is None:
            raise RequestError("prompts", f"the task is {self.facts.task}: call embed")
        return self._driver

    @cached_property
    def _template(self) -> ChatTemplate | None:
        from core.text.template_files import load_chat_template

        return load_chat_template(self._model_dir, self.options.model.chat_template)

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
    ) -> list[OfflineRequest]:
        all_prompts = as_list(prompts)
        given = SamplingParams() if sampling_params is None else sampling_params
        all_params = per_prompt("sampling_params", given, len(all_prompts))
        parts = _parts_of(self.llm_engine, lora_request, len(all_prompts))
        return [
            self._request(index, *prompt)
            for index, prompt in enumerate(zip(all_prompts, all_params, parts, strict=True))
        ]

    def _request(
        self, prompt_index: int, prompt: Prompt, params: SamplingParams, parts: tuple[Part, ...]
    ) -> OfflineRequest:
        if self._tokenizer is None and params.stop:
            raise RequestError("stop", "needs the model's tokenizer.json")
        if self._tokenizer is not None and params.bad_words:
            params = with_bad_word_ids(params, self._tokenizer)
        text, token_ids = encoded(prompt, self._tokenizer)
        kept = list(params.truncated(token_ids, self.facts.max_model_len))
        return OfflineRequest(prompt_index, text, kept, params, self._tokenizer, parts)


def _find_model(model: str | Path, options: Options) -> Path:
    from core.files.gguf import find_gguf, is_gguf, translated

    path = Path(model).expanduser()
    if not (path.is_dir() or is_gguf(path)):
        path = from_hub(
            str(model), options.source.revision, options.model, given_as="model", local=path
        )
    elif options.source.revision is not None:
        raise ConfigurationError(f"option 'revision' has no effect on the directory {path}")
    files = find_gguf(path)
    if not files:
        return path
    from engine.model.gguf.translate import translate

    return translated(files, lambda directory: translate(files, directory))


def _parts_of(engine: Parted, lora_request: LoRARequests, count: int) -> Sequence[tuple[Part, ...]]:
    """Return the parts of each of `count` prompts. Raises as `adapter_parts` does."""
    if lora_request is None:
        return [()] * count
    from engine.offline.lora_request import adapter_parts

    return adapter_parts(engine, lora_request, count)


def _parts(message: ChatMessage) -> Sequence[object]:
    content = message.get("content")
    return cast(Sequence[object], content) if isinstance(content, list | tuple) else ()


def _is_not_text(part: object) -> bool:
    match part:
        case {"type": str(kind)}:
            return kind != "text"
        case _:
            return False
