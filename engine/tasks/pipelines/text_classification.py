"""Text classification, which also scores pairs of texts: answers as transformers' pipeline gives.

The texts of a step are tokenized together, and batched by their length.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from core.configuration.options import Options
from core.errors import RequestError
from core.part import Part
from engine.encoder.own_layers import own_encoder
from engine.loading.model_source import ModelSource
from engine.tasks.lengths import longest_text, too_long
from engine.tasks.pipelines.input_reader import Parameters
from engine.tasks.pipelines.model import (
    HINT,
    PipelineModel,
    Sized,
    check_text_fields,
    is_truncated,
)
from engine.tasks.turns import batches, padded_limit
from engine.tasks.variants import start_variants

TASK = "text-classification"


Encoded = Mapping[str, list[int]]
"""A text or a pair of texts, as the model's arguments, [tokens] each."""


class _Row(NamedTuple):
    """An input for the model."""

    encoded: Encoded
    parts: tuple[Part, ...]

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.encoded)


class TextClassification(PipelineModel):
    """A `PipelineModel` that runs the steps of its pipeline for many inputs at once."""

    def __init__(self, source: ModelSource, options: Options, step_tokens: int) -> None:
        super().__init__(TASK, source, step_tokens)
        self.features, self.notes = start_variants(
            own_encoder(self.model),
            source,
            options,
            obstacle=self.encoder,
            classifier=self.model,
        )
        self.max_at_once = step_tokens
        self._max_padded = padded_limit(self.model, step_tokens)
        takes_cache = "use_cache" in inspect.signature(self.model.forward).parameters
        self._constants = {"use_cache": False} if takes_cache else {}

    def sized(self, inputs: list[Any], parameters: Parameters) -> Sequence[Sized]:
        return [
            encoded if isinstance(encoded, Exception) else (num_tokens(encoded), encoded)
            for encoded in self._encode(inputs, parameters)
        ]

    def prepare(self, given: Encoded, parameters: Parameters, parts: tuple[Part, ...]) -> _Row:
        return _Row(given, parts)

    def run(
        self, inputs: list[_Row], parameters: Parameters, between_runs: Callable[[], None]
    ) -> list[Any]:
        """As in `PipelineModel`. The batches have texts of similar length."""
        _, _, choices = self.pipeline._sanitize_parameters(**self._completed(parameters, inputs))
        results: dict[int, Any] = {}
        order = range(len(inputs))
        for batch in batches(order, lambda at: inputs[at].num_tokens, self._max_padded):
            if results:
                between_runs()
            logits = self._logits([inputs[at] for at in batch])
            for row, at in enumerate(batch):
                output = {"logits": logits[row : row + 1]}
                results[at] = self.pipeline.postprocess(output, **choices)
        return [results[at] for at in order]

    def unbatched(self, result: Any, given: Any, parameters: Parameters) -> Any:
        # transformers answers a single text with a list of one result.
        return [result] if isinstance(given, str) and "top_k" not in parameters else result

    def _encode(self, inputs: list[Any], parameters: Parameters) -> list[Encoded | Exception]:
        """Tokenize inputs: the single texts together, and the pairs."""
        arguments, _, _ = self.pipeline._sanitize_parameters(**self._completed(parameters, inputs))
        is_cut = is_truncated(parameters)
        results: dict[int, Encoded | Exception] = {}
        by_fields: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for at, given in enumerate(inputs):
            try:
                fields = tuple(sorted(check_text_fields(given)))
                if is_cut:
                    self.check_max_length(parameters, is_pair="text_pair" in fields)
                by_fields[fields].append(at)
            except RequestError as error:
                results[at] = error
        limit = longest_text(self.pipeline.tokenizer, self.model)
        for fields, places in by_fields.items():
            texts = [check_text_fields(inputs[at]) for at in places]
            columns = {name: [given[name] for given in texts] for name in fields}
            encoded = self.pipeline.tokenizer(**columns, **arguments, verbose=False)
            whole = encoded
            if not is_cut and "max_length" in arguments:  # transformers cuts to it without a word
                whole = self.pipeline.tokenizer(**columns, verbose=False)
            for row, at in enumerate(places):
                length = len(whole["input_ids"][row])
                if not is_cut and length > limit:
                    results[at] = too_long("inputs", length, limit, HINT.format("parameters"))
                else:
                    results[at] = {name: column[row] for name, column in encoded.items()}
        return [results[at] for at in range(len(inputs))]

    def _logits(self, rows: list[_Row]) -> torch.Tensor:
        """Return the logits [texts, labels] of a batch, on the CPU."""
        tokenizer = self.pipeline.tokenizer
        length = max(row.num_tokens for row in rows)
        fill = {"input_ids": tokenizer.pad_token_id or 0}
        padded: dict[str, torch.Tensor] = {}
        for name in rows[0].encoded:
            column = [
                _padded(row.encoded[name], length, fill.get(name, 0), tokenizer) for row in rows
            ]
            padded[name] = torch.tensor(column).to(self.model.device)
        parts = [row.parts for row in rows]
        own = own_encoder(self.model) if any(parts) else None
        with nullcontext() if own is None else own.carrying(parts):
            return self.model(**padded, **self._constants).logits.cpu()


def num_tokens(encoded: Encoded) -> int:
    return len(encoded["input_ids"])


def _padded(row: list[int], length: int, fill: int, tokenizer: Any) -> list[int]:
    padding = [fill] * (length - len(row))
    return padding + row if tokenizer.padding_side == "left" else row + padding
