"""Embeds prompts without a server, for `LLM.embed`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from tqdm import tqdm

from core.errors import GenerationError, RequestError
from core.foreign_code import reason_of
from core.part import Part
from core.protocol.task_bodies import EmbeddingAnswer, EmbeddingBody
from engine.offline.prompts import Prompt
from engine.tasks.engine import TaskEngine
from engine.tasks.performer import Answer, Job, Outcome


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector, which is `outputs.embedding` as in vLLM."""

    prompt: str | None
    """None if the prompt was given as token ids."""
    outputs: EmbeddingOutput
    num_prompt_tokens: int


def embed(
    engine: TaskEngine,
    prompts: Sequence[Prompt],
    parts: Sequence[tuple[Part, ...]],
    max_tokens: int | None,
    *,
    use_tqdm: bool,
) -> list[EmbeddingRequestOutput]:
    """Embed the prompts in batches that the strategy forms. Return one result per prompt, in order.

    parts: those of each prompt.

    Raises RequestError or GenerationError for the first prompt that fails; the others are aborted.
    """
    pending: dict[int, Prompt] = {}
    outputs: dict[int, EmbeddingRequestOutput] = {}
    try:
        for prompt, own_parts in zip(prompts, parts, strict=True):
            body = msgspec.msgpack.encode(
                EmbeddingBody([_text_or_token_ids(prompt)], "prompts", max_tokens)
            )
            pending[engine.add(Job(body, parts=own_parts), time.monotonic())] = prompt
        with tqdm(total=len(pending), desc="Embeddings", disable=not use_tqdm) as bar:
            while engine.has_work():
                ended = engine.advance(time.monotonic())
                for output in ended:
                    prompt = pending[output.request_id]
                    outputs[output.request_id] = _output(prompt, output.outcome)
                bar.update(len(ended))
                if not ended:
                    _wait(engine)
    finally:
        for id in pending:
            engine.abort(id)
    return [outputs[id] for id in pending]


def _text_or_token_ids(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        token_ids = prompt.get("prompt_token_ids")
        return list(token_ids) if token_ids is not None else str(prompt.get("prompt") or "")
    return prompt if isinstance(prompt, str) else list(prompt)


def _wait(engine: TaskEngine) -> None:
    """Sleep until the strategy's next step is due: `dynamic` may wait to fill a batch."""
    wake_at = engine.wake_at()
    if wake_at is not None:
        time.sleep(max(0.0, wake_at - time.monotonic()))


def _output(prompt: Prompt, outcome: Outcome) -> EmbeddingRequestOutput:
    match outcome:
        case Answer(body):
            answer = msgspec.msgpack.decode(body, type=EmbeddingAnswer)
        case RequestError():
            raise outcome
        case error:
            raise GenerationError(reason_of(error))
    vector = np.frombuffer(answer.vectors[0], "<f4").tolist()
    text_or_token_ids = _text_or_token_ids(prompt)
    text = text_or_token_ids if isinstance(text_or_token_ids, str) else None
    return EmbeddingRequestOutput(text, EmbeddingOutput(vector), answer.num_tokens[0])
