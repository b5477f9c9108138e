"""Extractive question answering: find the span of a context that answers a question.

transformers has the models but has dropped their pipeline; this one gives the same answers. A long
context is split into overlapping windows, as for BERT (Devlin et al., section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering

from core.configuration.limits import WINDOWS
from core.configuration.pipeline_tasks import QUESTION_ANSWERING
from core.errors import ConfigurationError, RequestError
from core.part import Feature, Part
from engine.loading.model_source import ModelSource
from engine.tasks.lengths import Windows, longest_text, plan_windows
from engine.tasks.loading import load_tokenizer, load_with_head
from engine.tasks.pipelines.model import CHARACTERS, MAX_AT_ONCE, Parameters, Sized, num_characters

WINDOWS_PER_RUN = 32
"""Windows that the model reads at once."""
_LENGTH, _STRIDE = 384, 128
"""The usual length and overlap of windows, in tokens."""
_MASKED = -1e4
"""Logit of a token that cannot be part of an answer; all others are larger."""


class _Question(NamedTuple):
    """A question, its context, and how to split the context."""

    question: str
    context: str
    windows: Windows


class _Window(NamedTuple):
    """A question with a part of its context, as tokens."""

    number: int
    """The index of the question in the run."""
    encoding: Any
    """The tokens with their places in the context."""
    arguments: Mapping[str, list[int]]
    """The model's arguments."""


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

    max_at_once = MAX_AT_ONCE
    notes: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()

    def __init__(self, source: ModelSource, step_tokens: int) -> None:
        self._least_tokens = max(1, step_tokens // MAX_AT_ONCE)
        self._tokenizer = load_tokenizer(source, QUESTION_ANSWERING)
        if not self._tokenizer.is_fast:
            raise ConfigurationError(
                "question-answering needs the model's tokenizer.json, for the character offsets of "
                "tokens"
            )
        self.model, self.encoder = load_with_head(
            source, AutoModelForQuestionAnswering, QUESTION_ANSWERING
        )
        self._limit = longest_text(self._tokenizer, self.model)

    def sized(self, inputs: list[Any], parameters: Parameters) -> Sequence[Sized]:
        return [
            (max(self._least_tokens, num_characters(given) // CHARACTERS), given)
            for given in inputs
        ]

    def prepare(self, given: Any, parameters: Parameters, parts: tuple[Part, ...]) -> _Question:
        match given:
            case {"question": str(question), "context": str(context)} if question and context:
                pass
            case _:
                raise RequestError("inputs", 'expected {"question": "...", "context": "..."}')
        length = min(parameters.get("max_seq_len", _LENGTH), self._limit)
        stride = parameters.get("doc_stride", _STRIDE)
        windows = plan_windows(self._tokenizer, question, length, stride)
        num_tokens = len(self._tokenizer.tokenize(context))
        WINDOWS.check("inputs.context", windows.count(num_tokens))
        return _Question(question, context, windows)

    def run(
        self, inputs: list[_Question], parameters: Parameters, between_runs: Callable[[], None]
    ) -> list[Any]:
        own = {name: parameters[name] for name in parameters.keys() - {"max_seq_len", "doc_stride"}}
        answers = [_Answer(item.context, **own) for item in inputs]
        windows = self._windows(inputs)
        while batch := list(islice(windows, WINDOWS_PER_RUN)):
            for window, (starts, ends) in zip(batch, self._logits(batch), strict=True):
                answers[window.number].add(window.encoding, starts, ends)
            between_runs()
        return [answer.result() for answer in answers]

    def unbatched(self, result: Any, given: Any, parameters: Parameters) -> Any:
        return result

    def _windows(self, inputs: list[_Question]) -> Iterator[_Window]:
        for index, (question, context, windows) in enumerate(inputs):
            encoded = self._tokenizer(
                question,
                context,
                truncation="only_second",
                max_length=windows.length,
                stride=windows.stride,
                return_overflowing_tokens=True,
            )
            names = [name for name in self._tokenizer.model_input_names if name in encoded]
            for row, encoding in enumerate(encoded.encodings):
                yield _Window(index, encoding, {name: encoded[name][row] for name in names})

    def _logits(self, windows: list[_Window]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits of each window's tokens, as the start and as the end of an answer."""
        names = windows[0].arguments
        rows = {name: [window.arguments[name] for window in windows] for name in names}
        padded = self._tokenizer.pad(rows, padding_side="right", return_tensors="pt")
        output = self.model(**padded.to(self.model.device))
        starts, ends = output.start_logits.float().cpu(), output.end_logits.float().cpu()
        for window, start, end in zip(windows, starts, ends, strict=True):
            length = len(window.encoding)
            yield start[:length], end[:length]


class _Answer:
    """The best spans of the windows that have been read. The parameters are transformers'."""

    def __init__(
        self,
        context: str,
        *,
        top_k: int = 1,
        max_answer_len: int = 15,
        handle_impossible_answer: bool = False,
    ) -> None:
        if min(top_k, max_answer_len) < 1:
            raise RequestError("parameters", "top_k and max_answer_len must be at least 1")
        self._context = context
        self._top_k = top_k
        self._max_tokens = max_answer_len
        self._may_be_empty = handle_impossible_answer
        self._no_answer = 1.0
        self._scores: dict[tuple[int, int], float] = {}
        """The scores of the best spans, by their first and last character."""

    def add(self, encoding: Any, starts: Tensor, ends: Tensor) -> None:
        """Add the spans of a window, whose logits are given."""
        allowed = torch.tensor([sequence == 1 for sequence in encoding.sequence_ids])
        # "No answer" is scored at the first token if that is a special token.
        if encoding.special_tokens_mask[0]:
            allowed[0] = True
        start, end = _probabilities(starts, allowed), _probabilities(ends, allowed)
        if encoding.special_tokens_mask[0]:
            self._no_answer = min(self._no_answer, (start[0] * end[0]).item())
            start[0] = end[0] = 0.0
        for score, first, last in _best_spans(encoding, start, end, self._top_k, self._max_tokens):
            self._scores[first, last] = max(score, self._scores.get((first, last), 0.0))
        self._scores = dict(self._ranked())

    def result(self) -> object:
        """Return the `top_k` best spans.

        With top_k=1, return the span itself instead of a list, or an empty list if there is none.
        """
        if self._may_be_empty:
            self._scores[0, 0] = max(self._no_answer, self._scores.get((0, 0), 0.0))
        results = [
            {"score": score, "start": start, "end": end, "answer": self._context[start:end]}
            for (start, end), score in self._ranked()
        ]
        return results[0] if self._top_k == 1 and results else results

    def _ranked(self) -> list[tuple[tuple[int, int], float]]:
        return sorted(self._scores.items(), key=lambda entry: -entry[1])[: self._top_k]


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
