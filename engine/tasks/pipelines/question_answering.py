"""Extractive question answering: find the span of a context that answers a question.

transformers has the models but has dropped their pipeline; this one gives the same answers. A long
context is split into overlapping windows, as for BERT (Devlin et al., section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering

from core.configuration.pipeline_tasks import QUESTION_ANSWERING
from core.errors import ConfigurationError, RequestError
from engine.loading.model_source import ModelSource
from engine.tasks.lengths import longest_text
from engine.tasks.loading import load_tokenizer, load_with_head
from engine.tasks.pipelines.model import Parameters

_MASKED = -1e4
"""Logit of a token that cannot be part of an answer; all others are larger."""


class _Span(NamedTuple):
    """A part of a context, in characters."""

    score: float
    """P(answer starts at `start`) * P(answer ends at `end`)."""
    start: int
    end: int


class QuestionAnswering:
    """A model with a span head, with the methods of `PipelineModel`.

    Raises ConfigurationError if the model has no such head or no fast tokenizer.
    """

    can_batch = True

    def __init__(self, source: ModelSource) -> None:
        self._tokenizer = load_tokenizer(source, QUESTION_ANSWERING)
        if not self._tokenizer.is_fast:
            raise ConfigurationError(
                "question-answering needs the model's tokenizer.json, for the character offsets of "
                "tokens"
            )
        self.model = load_with_head(source, AutoModelForQuestionAnswering, QUESTION_ANSWERING)
        self._limit = longest_text(self._tokenizer, self.model)

    def prepare(self, given: Any, parameters: Parameters) -> tuple[str, str]:
        match given:
            case {"question": str(question), "context": str(context)} if question and context:
                return question, context
            case _:
                raise RequestError("inputs", 'expected {"question": "...", "context": "..."}')

    def run(self, inputs: list[tuple[str, str]], parameters: Parameters) -> list[Any]:
        return self._answers(inputs, **parameters)

    def unbatched(self, result: Any, given: Any, parameters: Parameters) -> Any:
        return result

    def _answers(
        self,
        pairs: list[tuple[str, str]],
        *,
        top_k: int = 1,
        doc_stride: int = 128,
        max_answer_len: int = 15,
        max_seq_len: int = 384,
        handle_impossible_answer: bool = False,
    ) -> list[Any]:
        """Answer each (question, context) pair; parameters are as in the former pipeline."""
        if min(top_k, max_answer_len) < 1:
            raise RequestError("parameters", "top_k and max_answer_len must be at least 1")
        encoded = self._windows(pairs, min(max_seq_len, self._limit), doc_stride)
        pair_of_row = encoded.pop("overflow_to_sample_mapping").tolist()
        # "No answer" is scored at the first token if that is a special token.
        starts_special = encoded.pop("special_tokens_mask")[:, 0].bool()
        output = self.model(**encoded.to(self.model.device))
        starts, ends = output.start_logits.float().cpu(), output.end_logits.float().cpu()
        spans: list[list[_Span]] = [[] for _ in pairs]
        no_answer = [1.0] * len(pairs)
        for row, pair in enumerate(pair_of_row):
            encoding = encoded.encodings[row]
            allowed = torch.tensor([sequence == 1 for sequence in encoding.sequence_ids])
            allowed[0] |= starts_special[row]
            start, end = _probabilities(starts[row], allowed), _probabilities(ends[row], allowed)
            if starts_special[row]:
                no_answer[pair] = min(no_answer[pair], (start[0] * end[0]).item())
                start[0] = end[0] = 0.0
            spans[pair] += _best_spans(encoding, start, end, top_k, max_answer_len)
        if handle_impossible_answer:
            for pair, score in enumerate(no_answer):
                spans[pair].append(_Span(score, 0, 0))
        return [
            _result(context, candidates, top_k)
            for (_, context), candidates in zip(pairs, spans, strict=True)
        ]

    def _windows(self, pairs: list[tuple[str, str]], length: int, stride: int) -> Any:
        """Tokenize all pairs into overlapping windows of `length` tokens, one window per row."""
        return self._tokenizer(
            [question for question, _ in pairs],
            [context for _, context in pairs],
            truncation="only_second",
            max_length=length,
            stride=min(stride, length // 2),
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            padding=True,
            return_tensors="pt",
        )


def _probabilities(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax [tokens] of a window's logits over the allowed tokens."""
    return torch.where(allowed, logits, _MASKED).softmax(0) * allowed


def _best_spans(
    encoding: Any, start: Tensor, end: Tensor, count: int, max_tokens: int
) -> list[_Span]:
    """Return the most likely spans of a window, of at most `max_tokens`, widened to whole words."""
    scores = (start[:, None] * end[None, :]).triu().tril(max_tokens - 1)
    best = scores.flatten().topk(min(count, scores.numel()))
    return [
        _Span(score, *_characters(encoding, *divmod(index, len(end))))
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        if score > 0
    ]


def _characters(encoding: Any, first: int, last: int) -> tuple[int, int]:
    """Return the character range of a range of tokens, widened to whole words if possible."""
    words = encoding.token_to_word(first), encoding.token_to_word(last)
    if None in words:
        return encoding.offsets[first][0], encoding.offsets[last][1]
    return encoding.word_to_chars(words[0], 1)[0], encoding.word_to_chars(words[1], 1)[1]


def _result(context: str, spans: Sequence[_Span], top_k: int) -> object:
    """Return the `top_k` best spans, merging duplicates between windows.

    With top_k=1, return the span itself instead of a list, or an empty list if there is none.
    """
    merged: dict[tuple[int, int], float] = {}
    for score, start, end in spans:
        merged[start, end] = max(score, merged.get((start, end), 0.0))
    ranked = sorted(merged.items(), key=lambda entry: -entry[1])[:top_k]
    results = [
        {"score": score, "start": start, "end": end, "answer": context[start:end]}
        for (start, end), score in ranked
    ]
    return results[0] if top_k == 1 and results else results
