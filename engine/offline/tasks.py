"""Embedding without a server: what `engine.LLM.embed` does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from tqdm import tqdm

from core.errors import GenerationError, RequestError
from core.task_bodies import EmbeddingAnswer, EmbeddingBody
from engine.offline.prompts import Prompt
from engine.tasks.engine import TaskEngine
from engine.tasks.performer import Answer, Job, Outcome


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text and its vector, in the shape of vLLM's."""

    prompt: str | None
    """None where token ids were given."""
    outputs: EmbeddingOutput
    num_prompt_tokens: int


def embed(
    engine: TaskEngine, prompts: Sequence[Prompt], max_tokens: int | None, *, use_tqdm: bool
) -> list[EmbeddingRequestOutput]:
    """Batched as the strategy says; results in the order of prompts.

    Raises RequestError or GenerationError for the first that fails, and then embeds no more.
    """
    pending: dict[int, Prompt] = {}
    outputs: dict[int, EmbeddingRequestOutput] = {}
    try:
        for prompt in prompts:
            body = msgspec.msgpack.encode(EmbeddingBody([_given(prompt)], "prompts", max_tokens))
            pending[engine.add(Job(body), time.monotonic())] = prompt
        with tqdm(total=len(pending), desc="Embeddings", disable=not use_tqdm) as bar:
            while engine.has_work():
                ended = engine.step(time.monotonic())
                for each in ended:
                    outputs[each.request_id] = _output(pending[each.request_id], each.outcome)
                bar.update(len(ended))
                if not ended:
                    _wait(engine)
    finally:
        for id in pending:
            engine.abort(id)
    return [outputs[id] for id in pending]


def _given(prompt: Prompt) -> str | list[int]:
    """A text, or its token ids."""
    if isinstance(prompt, Mapping):
        token_ids = prompt.get("prompt_token_ids")
        return list(token_ids) if token_ids is not None else str(prompt.get("prompt") or "")
    return prompt if isinstance(prompt, str) else list(prompt)


def _wait(engine: TaskEngine) -> None:
    """Sleeps until the strategy wants the next step: a gang of `dynamic` may be filling."""
    wake_at = engine.strategy.wake_at()
    if wake_at is not None:
        time.sleep(max(0.0, wake_at - time.monotonic()))


def _output(prompt: Prompt, outcome: Outcome) -> EmbeddingRequestOutput:
    match outcome:
        case Answer(body):
            answer = msgspec.msgpack.decode(body, type=EmbeddingAnswer)
        case RequestError():
            raise outcome
        case error:
            raise GenerationError(f"{type(error).__name__}: {error}")
    vector = np.frombuffer(answer.vectors[0], "<f4").tolist()
    given = _given(prompt)
    text = given if isinstance(given, str) else None
    return EmbeddingRequestOutput(text, EmbeddingOutput(vector), answer.num_tokens[0])
