"""Texts to vectors: a model without a head, and pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

from core.errors import ConfigurationError, RequestError
from core.options import Options
from core.sizing import step_token_budget
from core.task import EMBEDDING
from core.task_bodies import EmbeddingAnswer, EmbeddingBody
from engine.loading.model_source import ModelSource
from engine.tasks.embedding.pooling import pool
from engine.tasks.embedding.settings import read_embedding_settings
from engine.tasks.lengths import longest_text
from engine.tasks.loading import describe, load_tokenizer
from engine.tasks.performer import Answer, Description, Job, Outcome, run_apart


class _Text(NamedTuple):
    """One of all texts of a batch."""

    job: int
    place: int
    token_ids: list[int]


class Embedder:
    """Embeds the texts of all requests of a batch, those of like length together."""

    def __init__(self, source: ModelSource, options: Options) -> None:
        self._settings = read_embedding_settings(source.model_dir, options)
        self._tokenizer = load_tokenizer(source, EMBEDDING)
        self._model = _load(source)
        own = longest_text(self._tokenizer, self._model)
        self._max_tokens = _max_tokens(options, min(own, self._settings.max_tokens or own))
        self._batch_tokens = step_token_budget(options, source.device.type)
        self._matryoshka = _matryoshka(source.config)
        self._decode = msgspec.msgpack.Decoder(EmbeddingBody).decode

    @property
    def description(self) -> Description:
        pooling = " + ".join(self._settings.pooling)
        form = "made 1 long" if self._settings.is_unit else "as long as they are"
        note = f"vectors are pooled by {pooling} and {form} ({self._settings.reason})"
        return describe(self._model, max_model_len=self._max_tokens, notes=(note,))

    @torch.inference_mode()
    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        bodies = [self._decode(job.body) for job in jobs]
        tokens = [self._tokens(body) for body in bodies]
        texts = [
            _Text(job, place, token_ids)
            for job, of_job in enumerate(tokens)
            if not isinstance(of_job, RequestError)
            for place, token_ids in enumerate(of_job)
        ]
        vectors: dict[tuple[int, int], Tensor | Exception] = {}
        for batch in self._batches(texts):
            results = run_apart(self._embed, batch, between_runs)
            vectors |= {(each.job, each.place): r for each, r in zip(batch, results, strict=True)}
            between_runs()
        return [
            self._outcome(body, of_job, [vectors[job, at] for at in range(len(of_job))])
            if not isinstance(of_job, RequestError)
            else of_job
            for job, (body, of_job) in enumerate(zip(bodies, tokens, strict=True))
        ]

    def _tokens(self, body: EmbeddingBody) -> list[list[int]] | RequestError:
        """Of each input of a request, or what is wrong with one of them."""
        try:
            self._check_dimensions(body.dimensions)
            return [
                self._encode(each, f"{body.field}[{at}]" if len(body.inputs) > 1 else body.field,
                             body.max_tokens)
                for at, each in enumerate(body.inputs)
            ]  # fmt: skip
        except RequestError as error:
            return error

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        width = self._model.config.get_text_config().hidden_size * len(self._settings.pooling)
        if not self._matryoshka:
            raise RequestError(
                "dimensions",
                f"the model's vectors have {width} numbers and were not trained to be cut "
                "(matryoshka_dimensions in its config.json)",
            )
        allowed = self._matryoshka if isinstance(self._matryoshka, list) else range(1, width + 1)
        if dimensions not in allowed:
            raise RequestError("dimensions", f"the model's vectors may have {_listed(allowed)}")

    def _encode(self, text: str | list[int], field: str, max_tokens: int | None) -> list[int]:
        limit = self._max_tokens if max_tokens is None else min(max_tokens, self._max_tokens)
        if isinstance(text, str):
            text = self._settings.prefix + text
            if self._settings.is_lower_case:
                text = text.lower()
            cut = {"truncation": True, "max_length": limit} if max_tokens is not None else {}
            token_ids: list[int] = self._tokenizer(text, verbose=False, **cut)["input_ids"]
        else:
            token_ids = text if max_tokens is None else text[:limit]
            vocab_size = self._model.get_input_embeddings().num_embeddings
            if not all(0 <= each < vocab_size for each in token_ids):
                raise RequestError(field, f"token ids are 0 to {vocab_size - 1}")
        if len(token_ids) > limit:
            raise RequestError(
                field, f"has {len(token_ids)} tokens; the model takes {limit}, unless it is cut"
            )
        if not token_ids:
            raise RequestError(field, "has no tokens")
        return token_ids

    def _batches(self, texts: list[_Text]) -> Iterator[list[_Text]]:
        """Padded, none has more tokens than a step may have, or it is a single text."""
        batch: list[_Text] = []
        for text in sorted(texts, key=lambda each: len(each.token_ids)):
            if batch and (len(batch) + 1) * len(text.token_ids) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(text)
        if batch:
            yield batch

    def _embed(self, texts: list[_Text]) -> list[Tensor]:
        """A vector [size] in fp32, on the host, for each."""
        longest = max(len(each.token_ids) for each in texts)
        pad = self._tokenizer.pad_token_id or 0
        rows = [each.token_ids + [pad] * (longest - len(each.token_ids)) for each in texts]
        lengths = torch.tensor([len(each.token_ids) for each in texts])
        mask = (torch.arange(longest) < lengths[:, None]).long().to(self._model.device)
        ids = torch.tensor(rows, device=self._model.device)
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        vectors = pool(self._settings.pooling, hidden, mask, is_unit=self._settings.is_unit)
        return list(vectors.cpu())

    def _outcome(
        self, body: EmbeddingBody, tokens: list[list[int]], vectors: list[Tensor | Exception]
    ) -> Outcome:
        packed: list[bytes] = []
        for vector in vectors:
            if isinstance(vector, Exception):
                return vector
            if body.dimensions is not None:
                vector = vector[: body.dimensions]
                vector = normalize(vector, dim=0) if self._settings.is_unit else vector
            packed.append(vector.numpy().astype(np.dtype("<f4")).tobytes())
        answer = EmbeddingAnswer(packed, list(map(len, tokens)))
        return Answer(msgspec.msgpack.encode(answer), "application/msgpack")


def _load(source: ModelSource) -> Any:
    """The model on its device; of one with a decoder beside it, the encoder."""
    try:
        model: Any = source.load(AutoModel)
    except Exception as error:  # whatever a library for files of weights may raise
        raise ConfigurationError(
            f"transformers cannot load {source.config.model_type} for {EMBEDDING}: {error}"
        ) from error
    if source.config.is_encoder_decoder:
        model = model.get_encoder()
    return model.to(source.device).eval()


def _max_tokens(options: Options, limit: int) -> int:
    if options.max_model_len is None:
        return limit
    if options.max_model_len > limit:
        raise ConfigurationError(
            f"option.max_model_len={options.max_model_len}: the model takes {limit} tokens"
        )
    return options.max_model_len


def _matryoshka(config: Any) -> list[int] | bool:
    """The lengths that a vector may be cut to; True: any."""
    sizes = getattr(config, "matryoshka_dimensions", None)
    return sizes or bool(getattr(config, "is_matryoshka", False))


def _listed(sizes: Sequence[int]) -> str:
    if isinstance(sizes, range):
        return f"{sizes[0]} to {sizes[-1]} numbers"
    return f"{', '.join(map(str, sizes))} numbers"
