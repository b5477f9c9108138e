"""Text embeddings: a transformers model without a head, followed by pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForMaskedLM

from core.configuration.options import Options
from core.configuration.task import EMBEDDING
from core.errors import ConfigurationError, RequestError
from core.foreign_code import contained
from core.part import Part
from core.protocol.task_bodies import EmbeddingAnswer, EmbeddingBody
from engine.encoder.own_layers import own_encoder
from engine.loading.model_source import ModelSource
from engine.tasks.embedding.dense import DenseModule
from engine.tasks.embedding.pooling import pool
from engine.tasks.embedding.settings import read_embedding_settings
from engine.tasks.lengths import longest_text
from engine.tasks.loading import describe, load_tokenizer, load_with_head, place
from engine.tasks.performer import Answer, Description, Job, Outcome, run_isolated
from engine.tasks.turns import Prepared, Waiting, batches, padded_limit, take_turns
from engine.tasks.variants import start_variants


@dataclass(slots=True, eq=False)
class _Progress:
    """How far a request is."""

    body: EmbeddingBody
    num_tokens: list[int]
    """Tokens of each text, once it is tokenized."""
    vectors: list[Tensor | None]
    """One vector per text, once it is embedded."""
    parts: tuple[Part, ...] = ()
    failure: Exception | None = None


class _Text(NamedTuple):
    """One text of a request."""

    progress: _Progress
    position: int
    """Its index in the request."""
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Embedder:
    """Embeds the texts of all running requests, in steps of one forward pass."""

    def __init__(self, source: ModelSource, options: Options, step_tokens: int) -> None:
        """step_tokens: the token budget of a step."""
        self._settings = read_embedding_settings(source.model_dir, options)
        self._tokenizer = load_tokenizer(source, EMBEDDING)
        self._is_sparse = self._settings.pooling == ("splade",)
        self.model, self._encoder = _load(source, has_head=self._is_sparse)
        self._dense: list[DenseModule] = []
        for folder in self._settings.dense:
            self._dense.append(DenseModule(folder, self._width, source))
        self._features, self._notes = start_variants(
            None if self._is_sparse else own_encoder(self.model),
            source,
            options,
            obstacle="sparse ones" if self._is_sparse else self._encoder,
        )
        limit = longest_text(self._tokenizer, self.model)
        self._max_tokens = _max_tokens(options, min(limit, self._settings.max_tokens or limit))
        self._batch_tokens = step_tokens
        self._matryoshka = _matryoshka_sizes(source.config)
        self._running: WeakKeyDictionary[Job, tuple[_Progress, Waiting[list[int]]]] = (
            WeakKeyDictionary()
        )
        self._decode = msgspec.msgpack.Decoder(EmbeddingBody).decode

    @property
    def description(self) -> Description:
        pooling = " + ".join(self._settings.pooling)
        widths = "".join(f", dense to {layer.width}" for layer in self._dense)
        form = "normalized" if self._settings.is_normalized else "not normalized"
        note = f"pooling: {pooling}{widths}; vectors are {form} ({self._settings.reason})"
        return describe(
            self.model,
            self._encoder,
            max_model_len=self._max_tokens,
            notes=(note, *self._notes),
            features=self._features,
        )

    @torch.inference_mode()
    def perform(
        self, jobs: Sequence[Job], between_runs: Callable[[], None]
    ) -> list[Outcome | None]:
        """Embed as many texts of these requests as fit into one forward pass, by turns."""
        for job in jobs:
            if job not in self._running:
                self._running[job] = self._begin(self._decode(job.body), job.parts)
        running = [self._running[job] for job in jobs]
        turns = {progress: waiting for progress, waiting in running if progress.failure is None}
        taken = take_turns(turns, self._batch_tokens)
        texts = [_Text(progress, item.position, item.value) for progress, item in taken]
        between_runs()
        limit = self._batch_tokens  # a head computes padding, too
        if not self._is_sparse:
            limit = padded_limit(self.model, limit)
        for batch in batches(texts, lambda text: text.num_tokens, limit):
            results = run_isolated(self._embed, batch, between_runs)
            for text, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    text.progress.failure = result
                else:
                    text.progress.vectors[text.position] = result
            between_runs()
        return [self._outcome(*progress) for progress in running]

    def _begin(
        self, body: EmbeddingBody, parts: tuple[Part, ...]
    ) -> tuple[_Progress, Waiting[list[int]]]:
        num_texts = len(body.inputs)
        progress = _Progress(body, [0] * num_texts, [None] * num_texts, parts)
        try:
            self._check_dimensions(body.dimensions)
            self._check_prompt(body.prompt_name)
            if body.is_sparse not in (None, self._is_sparse):
                kind, path = ("sparse", "/embed_sparse") if self._is_sparse else ("dense", "/embed")
                raise RequestError("model", f"has {kind} vectors; ask {path} for them")
        except RequestError as error:
            progress.failure = error
        return progress, Waiting(list(map(len, body.inputs)), partial(self._prepare, progress))

    def _outcome(self, progress: _Progress, waiting: Waiting[list[int]]) -> Outcome | None:
        """Return the answer or the failure of a request; None if texts are left."""
        if progress.failure is not None:
            return progress.failure
        return self._answer(progress) if waiting.has_ended else None

    def _prepare(self, progress: _Progress, positions: list[int]) -> list[Prepared[list[int]]]:
        """Tokenize these texts of a request; fail it if one of them is wrong."""
        if progress.failure is not None:
            return []
        positions = sorted(positions)
        try:
            with contained:
                rows = self._token_ids(progress.body, positions)
            for position, row in zip(positions, rows, strict=True):
                self._check(progress.body, position, row)
        except Exception as error:  # the tokenizer may raise anything
            progress.failure = error
            return []
        for position, row in zip(positions, rows, strict=True):
            progress.num_tokens[position] = len(row)
        return [Prepared(len(row), at, row) for at, row in zip(positions, rows, strict=True)]

    @property
    def _width(self) -> int:
        """Numbers of a vector."""
        if self._dense:
            return self._dense[-1].width
        return self.model.config.get_text_config().hidden_size * len(self._settings.pooling)

    def _check_dimensions(self, dimensions: int | None) -> None:
        width = self._width
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

    def _check_prompt(self, name: str | None) -> None:
        prompts = self._settings.prompts
        if name is not None and name not in prompts:
            known = f"prompts are {', '.join(prompts)}" if prompts else "it has none"
            raise RequestError("prompt_name", f"the model has no prompt {name!r}; {known}")

    def _token_ids(self, body: EmbeddingBody, positions: list[int]) -> list[list[int]]:
        """Return the token ids of texts, truncated if the request asks for that."""
        limit = self._limit(body)
        is_cut = body.max_tokens is not None
        inputs = [body.inputs[position] for position in positions]
        name, settings = body.prompt_name, self._settings
        prefix = settings.prefix if name is None else settings.prompts[name]
        texts = [prefix + text for text in inputs if isinstance(text, str)]
        if settings.is_lower_case:
            texts = [text.lower() for text in texts]
        encoded: Iterator[list[int]] = iter(())
        if texts:
            self._check_room(limit)
            truncation = {"truncation": True, "max_length": limit} if is_cut else {}
            encoded = iter(self._tokenizer(texts, verbose=False, **truncation)["input_ids"])
        return [
            next(encoded) if isinstance(given, str) else given[:limit] if is_cut else given
            for given in inputs
        ]

    def _limit(self, body: EmbeddingBody) -> int:
        return min(body.max_tokens or self._max_tokens, self._max_tokens)

    def _check(self, body: EmbeddingBody, position: int, token_ids: list[int]) -> None:
        """Raise RequestError if the model cannot embed the tokens of a text."""
        field = f"{body.field}[{position}]" if len(body.inputs) > 1 else body.field
        limit = self._limit(body)
        if not isinstance(body.inputs[position], str):
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

    def _check_room(self, limit: int) -> None:
        """Raise RequestError if no token of a text is left once it is truncated to `limit`."""
        num_special = self._tokenizer.num_special_tokens_to_add()
        if limit <= num_special:
            raise RequestError(
                "truncate_prompt_tokens",
                f"must be at least {num_special + 1}, because the model adds {num_special} special "
                "tokens to a text",
            )

    def _embed(self, texts: list[_Text]) -> list[Tensor]:
        """Return one vector [size] per text, fp32 on the CPU; torch's sparse ones of SPLADE."""
        longest = max(len(text.token_ids) for text in texts)
        pad = self._tokenizer.pad_token_id or 0
        rows = [text.token_ids + [pad] * (longest - len(text.token_ids)) for text in texts]
        lengths = torch.tensor([len(text.token_ids) for text in texts])
        mask = (torch.arange(longest) < lengths[:, None]).long().to(self.model.device)
        ids = torch.tensor(rows, device=self.model.device)
        parts = [text.progress.parts for text in texts]
        used = {"parts": parts} if any(parts) else {}  # an argument of our own layers only
        output = self.model(input_ids=ids, attention_mask=mask, **used)
        hidden = output.logits if self._is_sparse else output.last_hidden_state
        vectors = pool(self._settings.pooling, hidden, mask)
        for layer in self._dense:
            vectors = layer(vectors)
        if not self._is_sparse:
            return list(vectors.cpu())
        vectors = normalize(vectors, dim=-1) if self._settings.is_normalized else vectors
        return [vector.to_sparse() for vector in vectors.cpu()]

    def _answer(self, progress: _Progress) -> Answer:
        body = progress.body
        embedded = [vector for vector in progress.vectors if vector is not None]
        if self._is_sparse:
            places = [_bytes(vector.indices()[0], "<i4") for vector in embedded]
            packed = [_bytes(vector.values(), "<f4") for vector in embedded]
        else:
            vectors = torch.stack(embedded)[:, : body.dimensions]
            if self._settings.is_normalized if body.normalize is None else body.normalize:
                vectors = normalize(vectors, dim=-1)
            places, packed = None, [_bytes(vector, "<f4") for vector in vectors]
        answer = EmbeddingAnswer(packed, progress.num_tokens, places)
        return Answer(msgspec.msgpack.encode(answer), "application/msgpack")


def _bytes(numbers: Tensor, dtype: str) -> bytes:
    return numbers.numpy().astype(np.dtype(dtype)).tobytes()


def _load(source: ModelSource, *, has_head: bool) -> tuple[Any, str]:
    """Load the model; keep only the encoder of an encoder-decoder model. Return as `place` does.

    has_head: with the head of a masked language model.
    """
    if has_head:
        return load_with_head(source, AutoModelForMaskedLM, EMBEDDING)
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
