"""Text embeddings: a transformers model without a head, followed by pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

from core.configuration.batching import DEFAULT_STEP_TOKENS
from core.configuration.options import Options
from core.configuration.task import EMBEDDING
from core.errors import ConfigurationError, RequestError
from core.foreign_code import contained
from core.protocol.task_bodies import EmbeddingAnswer, EmbeddingBody
from engine.encoder.own_layers import own_encoder
from engine.loading.model_source import ModelSource
from engine.tasks.embedding.pooling import pool
from engine.tasks.embedding.settings import read_embedding_settings
from engine.tasks.lengths import longest_text
from engine.tasks.loading import describe, load_tokenizer, place
from engine.tasks.performer import Answer, Description, Job, Outcome, run_isolated

MAX_PADDING = 8
"""Padded tokens of a batch for our own layers, in token budgets."""


@dataclass(slots=True, eq=False)
class _Progress:
    """How far a request is."""

    body: EmbeddingBody
    texts: list[list[int]]
    """The token ids of its texts."""
    vectors: list[Tensor | None]
    """One vector per text, once it is embedded."""
    left: list[int]
    """The texts that are still to be embedded, the shortest last."""
    num_tokens: int = 0
    """Tokens embedded so far."""


class _Text(NamedTuple):
    """One text of a request."""

    progress: _Progress
    position: int
    """Its index in the request."""

    @property
    def token_ids(self) -> list[int]:
        return self.progress.texts[self.position]


class Embedder:
    """Embeds the texts of all running requests, in steps of one forward pass."""

    def __init__(self, source: ModelSource, options: Options) -> None:
        self._settings = read_embedding_settings(source.model_dir, options)
        self._tokenizer = load_tokenizer(source, EMBEDDING)
        self.model, self._encoder = _load(source)
        limit = longest_text(self._tokenizer, self.model)
        self._max_tokens = _max_tokens(options, min(limit, self._settings.max_tokens or limit))
        budget = options.strategy.max_rolling_batch_prefill_tokens
        self._batch_tokens = budget or DEFAULT_STEP_TOKENS[source.device.type]
        self._matryoshka = _matryoshka_sizes(source.config)
        self._progress: WeakKeyDictionary[Job, _Progress] = WeakKeyDictionary()
        self._decode = msgspec.msgpack.Decoder(EmbeddingBody).decode

    @property
    def description(self) -> Description:
        pooling = " + ".join(self._settings.pooling)
        form = "normalized" if self._settings.is_normalized else "not normalized"
        note = f"pooling: {pooling}; vectors are {form} ({self._settings.reason})"
        return describe(self.model, self._encoder, max_model_len=self._max_tokens, notes=(note,))

    @torch.inference_mode()
    def perform(
        self, jobs: Sequence[Job], between_runs: Callable[[], None]
    ) -> list[Outcome | None]:
        """Embed as many texts of these requests as fit into one forward pass, by turns."""
        outcomes: dict[Job, Outcome | None] = dict.fromkeys(jobs)
        for job in jobs:
            if job not in self._progress:
                body = self._decode(job.body)
                texts = self._tokenize(body)
                if isinstance(texts, Exception):
                    outcomes[job] = texts
                else:
                    self._progress[job] = _begin(body, texts)
                between_runs()
        running = {job: self._progress[job] for job in jobs if job in self._progress}
        failures: dict[_Progress, Exception] = {}
        for batch in self._batches(self._next_texts(running.values())):
            results = run_isolated(self._embed, batch, between_runs)
            for text, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    failures[text.progress] = result
                else:
                    text.progress.vectors[text.position] = result
            between_runs()
        for job, progress in running.items():
            vectors = [vector for vector in progress.vectors if vector is not None]
            if progress in failures:
                outcomes[job] = failures[progress]
            elif len(vectors) == len(progress.vectors):
                outcomes[job] = self._answer(progress, vectors)
        return list(outcomes.values())

    def _next_texts(self, running: Iterable[_Progress]) -> list[_Text]:
        """Return the texts of one forward pass, within the token budget.

        The request with the fewest tokens so far has the next turn. So one of a single text waits
        for no more than a step, however many texts the others have.
        """
        turns = [(progress.num_tokens, turn, progress) for turn, progress in enumerate(running)]
        heapify(turns)
        texts: list[_Text] = []
        num_left = self._batch_tokens
        while turns:
            _, turn, progress = heappop(turns)
            if not progress.left:
                continue
            text = _Text(progress, progress.left[-1])
            num_tokens = len(text.token_ids)
            if texts and num_tokens > num_left:
                continue
            texts.append(text)
            num_left -= num_tokens
            progress.left.pop()
            progress.num_tokens += num_tokens
            heappush(turns, (progress.num_tokens, turn, progress))
        return texts

    def _tokenize(self, body: EmbeddingBody) -> list[list[int]] | Exception:
        try:
            self._check_dimensions(body.dimensions)
            with contained:
                return [
                    self._encode(text,
                                 f"{body.field}[{index}]" if len(body.inputs) > 1 else body.field,
                                 body.max_tokens)
                    for index, text in enumerate(body.inputs)
                ]  # fmt: skip
        except Exception as error:  # the tokenizer may raise anything
            return error

    def _check_dimensions(self, dimensions: int | None) -> None:
        width = self.model.config.get_text_config().hidden_size * len(self._settings.pooling)
        if dimensions is None or dimensions == width:
            return
        if not self._matryoshka:
            raise RequestError(
                "dimensions",
                f"the model's vectors have {width} dimensions; it was not trained for fewer "
                "(no matryoshka_dimensions in its config.json)",
            )
        allowed = self._matryoshka if isinstance(self._matryoshka, list) else range(1, width + 1)
        if dimensions not in allowed:
            raise RequestError("dimensions", f"the model supports {_format_sizes(allowed)}")

    def _encode(self, text: str | list[int], field: str, max_tokens: int | None) -> list[int]:
        limit = self._max_tokens if max_tokens is None else min(max_tokens, self._max_tokens)
        if isinstance(text, str):
            self._check_room(limit)
            text = self._settings.prefix + text
            if self._settings.is_lower_case:
                text = text.lower()
            truncation = {"truncation": True, "max_length": limit} if max_tokens is not None else {}
            token_ids: list[int] = self._tokenizer(text, verbose=False, **truncation)["input_ids"]
        else:
            token_ids = text if max_tokens is None else text[:limit]
            vocab_size = self.model.get_input_embeddings().num_embeddings
            if not all(0 <= token_id < vocab_size for token_id in token_ids):
                raise RequestError(field, f"token ids must be between 0 and {vocab_size - 1}")
        if len(token_ids) > limit:
            raise RequestError(
                field,
                f"has {len(token_ids)} tokens; the model takes at most {limit}; shorten it, or set "
                "truncate=true (truncate_prompt_tokens=-1 in /v1/embeddings)",
            )
        if not token_ids:
            raise RequestError(field, "has no tokens")
        return token_ids

    def _check_room(self, limit: int) -> None:
        """Raise RequestError if no token of a text is left once it is truncated to `limit`."""
        num_special = self._tokenizer.num_special_tokens_to_add()
        if limit <= num_special:
            raise RequestError(
                "truncate_prompt_tokens",
                f"must be at least {num_special + 1}, because the model adds {num_special} special "
                "tokens to a text",
            )

    def _batches(self, texts: list[_Text]) -> Iterator[list[_Text]]:
        """Yield batches of texts of similar length, whose padded tokens stay within limits.

        Our own layers compute no padding, but take padded batches. A single text over the limit is
        a batch of its own.
        """
        limit = self._batch_tokens * (MAX_PADDING if own_encoder(self.model) else 1)
        batch: list[_Text] = []
        for text in sorted(texts, key=lambda text: len(text.token_ids)):
            if batch and (len(batch) + 1) * len(text.token_ids) > limit:
                yield batch
                batch = []
            batch.append(text)
        if batch:
            yield batch

    def _embed(self, texts: list[_Text]) -> list[Tensor]:
        """Return one vector [size] per text, fp32 on the CPU."""
        longest = max(len(text.token_ids) for text in texts)
        pad = self._tokenizer.pad_token_id or 0
        rows = [text.token_ids + [pad] * (longest - len(text.token_ids)) for text in texts]
        lengths = torch.tensor([len(text.token_ids) for text in texts])
        mask = (torch.arange(longest) < lengths[:, None]).long().to(self.model.device)
        ids = torch.tensor(rows, device=self.model.device)
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        vectors = pool(
            self._settings.pooling, hidden, mask, is_normalized=self._settings.is_normalized
        )
        return list(vectors.cpu())

    def _answer(self, progress: _Progress, vectors: list[Tensor]) -> Answer:
        size = progress.body.dimensions
        packed: list[bytes] = []
        for vector in vectors:
            if size is not None:
                vector = vector[:size]
                vector = normalize(vector, dim=0) if self._settings.is_normalized else vector
            packed.append(vector.numpy().astype(np.dtype("<f4")).tobytes())
        answer = EmbeddingAnswer(packed, list(map(len, progress.texts)))
        return Answer(msgspec.msgpack.encode(answer), "application/msgpack")


def _begin(body: EmbeddingBody, texts: list[list[int]]) -> _Progress:
    left = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    return _Progress(body, texts, [None] * len(texts), left)


def _load(source: ModelSource) -> tuple[Any, str]:
    """Load the model; keep only the encoder of an encoder-decoder model. Return as `place` does."""
    try:
        with contained:
            model: Any = source.load(AutoModel)
    except Exception as error:  # loading may raise anything, depending on the weight format
        raise ConfigurationError(
            f"transformers cannot load {source.config.model_type} for {EMBEDDING}: {error}"
        ) from error
    if source.config.is_encoder_decoder:
        model = model.get_encoder()
    return place(model, source, EMBEDDING)


def _max_tokens(options: Options, limit: int) -> int:
    if options.memory.max_model_len is None:
        return limit
    if options.memory.max_model_len > limit:
        raise ConfigurationError(
            f"option.max_model_len={options.memory.max_model_len}: the model takes {limit} tokens"
        )
    return options.memory.max_model_len


def _matryoshka_sizes(config: Any) -> list[int] | bool:
    """Return the sizes a vector may be truncated to; True means any size, False none."""
    sizes = getattr(config, "matryoshka_dimensions", None)
    return sizes or bool(getattr(config, "is_matryoshka", False))


def _format_sizes(sizes: Sequence[int]) -> str:
    if isinstance(sizes, range):
        return f"{sizes[0]} to {sizes[-1]} dimensions"
    return f"{', '.join(map(str, sizes))} dimensions"
