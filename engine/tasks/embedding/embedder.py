"""Text embeddings: a transformers model without a head, followed by pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
from engine.loading.model_source import ModelSource
from engine.tasks.embedding.pooling import pool
from engine.tasks.embedding.settings import read_embedding_settings
from engine.tasks.lengths import longest_text
from engine.tasks.loading import describe, load_tokenizer
from engine.tasks.performer import Answer, Description, Job, Outcome, run_isolated


class _Text(NamedTuple):
    """One input of a request in a batch."""

    job: int
    """Index of the request in the batch."""
    position: int
    """Index of the text in the request."""
    token_ids: list[int]


class Embedder:
    """Embeds the texts of all requests of a batch, running texts of similar length together."""

    def __init__(self, source: ModelSource, options: Options) -> None:
        self._settings = read_embedding_settings(source.model_dir, options)
        self._tokenizer = load_tokenizer(source, EMBEDDING)
        self.model = _load(source)
        limit = longest_text(self._tokenizer, self.model)
        self._max_tokens = _max_tokens(options, min(limit, self._settings.max_tokens or limit))
        budget = options.strategy.max_rolling_batch_prefill_tokens
        self._batch_tokens = budget or DEFAULT_STEP_TOKENS[source.device.type]
        self._matryoshka = _matryoshka_sizes(source.config)
        self._decode = msgspec.msgpack.Decoder(EmbeddingBody).decode

    @property
    def description(self) -> Description:
        pooling = " + ".join(self._settings.pooling)
        form = "normalized" if self._settings.is_normalized else "not normalized"
        note = f"pooling: {pooling}; vectors are {form} ({self._settings.reason})"
        return describe(self.model, max_model_len=self._max_tokens, notes=(note,))

    @torch.inference_mode()
    def perform(self, jobs: Sequence[Job], between_runs: Callable[[], None]) -> list[Outcome]:
        bodies = [self._decode(job.body) for job in jobs]
        tokenized: list[list[list[int]] | Exception] = []
        for body in bodies:
            tokenized.append(self._tokenize(body))
            between_runs()
        texts = [
            _Text(job, position, token_ids)
            for job, tokens in enumerate(tokenized)
            if not isinstance(tokens, Exception)
            for position, token_ids in enumerate(tokens)
        ]
        vectors: dict[tuple[int, int], Tensor | Exception] = {}
        for batch in self._batches(texts):
            results = run_isolated(self._embed, batch, between_runs)
            for text, result in zip(batch, results, strict=True):
                vectors[text.job, text.position] = result
            between_runs()
        return [
            self._outcome(body, tokens, [vectors[job, index] for index in range(len(tokens))])
            if not isinstance(tokens, Exception)
            else tokens
            for job, (body, tokens) in enumerate(zip(bodies, tokenized, strict=True))
        ]

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
        """Yield batches of texts of similar length, which stay within the token budget when padded.

        A single text over the budget is a batch of its own.
        """
        batch: list[_Text] = []
        for text in sorted(texts, key=lambda text: len(text.token_ids)):
            if batch and (len(batch) + 1) * len(text.token_ids) > self._batch_tokens:
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

    def _outcome(
        self, body: EmbeddingBody, tokens: list[list[int]], vectors: list[Tensor | Exception]
    ) -> Outcome:
        packed: list[bytes] = []
        for vector in vectors:
            if isinstance(vector, Exception):
                return vector
            if body.dimensions is not None:
                vector = vector[: body.dimensions]
                vector = normalize(vector, dim=0) if self._settings.is_normalized else vector
            packed.append(vector.numpy().astype(np.dtype("<f4")).tobytes())
        answer = EmbeddingAnswer(packed, list(map(len, tokens)))
        return Answer(msgspec.msgpack.encode(answer), "application/msgpack")


def _load(source: ModelSource) -> Any:
    """Load the model onto its device; keep only the encoder of an encoder-decoder model."""
    try:
        with contained:
            model: Any = source.load(AutoModel)
    except Exception as error:  # loading may raise anything, depending on the weight format
        raise ConfigurationError(
            f"transformers cannot load {source.config.model_type} for {EMBEDDING}: {error}"
        ) from error
    if source.config.is_encoder_decoder:
        model = model.get_encoder()
    return model.to(source.device).eval()


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
