"""What the offline class gives, in the shapes and words of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.sampling import MAX_LOGPROBS, Finish, SamplingParams, TopLogprobs
from core.text.answer import Answer, TokenText
from core.text.answers import News
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token that stands in a place, or might have."""

    logprob: float
    """Under the unfiltered model, in nats."""
    rank: int
    """1 is the most likely token."""
    decoded_token: str | None
    """None without a tokenizer."""


Logprobs = dict[int, Logprob]
"""By token id: the token in a place and the most likely ones there."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    """Of all generated tokens under the unfiltered model, in nats."""
    logprobs: list[Logprobs] | None
    """Of each generated token, where `SamplingParams.logprobs` is set."""
    finish_reason: str
    """`stop` (end-of-sequence token or stop text) or `length`, as in vLLM and OpenAI."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    """After `SamplingParams.truncate_prompt_tokens`."""
    outputs: list[CompletionOutput]
    """`n` of them; with `best_of` the best first."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """Of each prompt token, where `SamplingParams.prompt_logprobs` is set; None for the first."""
    finished: bool = True


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new of one answer."""

    prompt_index: int
    """Which of the prompts it answers."""
    index: int
    """Which of the `n` answers to it."""
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    """Set on the last one of an answer."""


def completion_output(
    index: int, answer: Answer, params: SamplingParams, tokenizer: Tokenizer | None
) -> CompletionOutput:
    """An answer that has ended."""
    assert answer.finish is not None
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=[token.id for token in answer.tokens],
        cumulative_logprob=answer.cumulative_logprob,
        logprobs=_logprobs(answer.tokens, params, tokenizer),
        finish_reason=_finish_reason(answer.finish),
    )


def output_delta(
    prompt_index: int, news: News, params: SamplingParams, tokenizer: Tokenizer | None
) -> OutputDelta:
    """What is new of the answer to the prompt of that number."""
    return OutputDelta(
        prompt_index=prompt_index,
        index=news.index,
        text="".join(token.text for token in news.tokens),
        token_ids=[token.id for token in news.tokens],
        logprobs=_logprobs(news.tokens, params, tokenizer),
        finish_reason=None if news.finish is None else _finish_reason(news.finish),
    )


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TopLogprobs], tokenizer: Tokenizer | None
) -> list[Logprobs | None]:
    """Of each token of a prompt. `scores` are those from the second token on."""
    places = zip(token_ids[1:], scores, strict=True)
    return [None, *(_named(token_id, score, tokenizer) for token_id, score in places)]


def _logprobs(
    tokens: Sequence[TokenText], params: SamplingParams, tokenizer: Tokenizer | None
) -> list[Logprobs] | None:
    if params.logprobs is None:
        return None
    return [_named(token.id, token.top, tokenizer) for token in tokens if token.top is not None]


def _named(token_id: int, top: TopLogprobs, tokenizer: Tokenizer | None) -> Logprobs:
    """The token in the place first, then the others by rank."""
    ranked = [(token_id, top.logprob, top.rank)]
    ranked += zip(top.token_ids, top.logprobs, range(1, MAX_LOGPROBS + 1), strict=False)
    return {
        id: Logprob(logprob, rank, tokenizer.piece(id) if tokenizer else None)
        for id, logprob, rank in ranked
    }


def _finish_reason(finish: Finish) -> str:
    return "length" if finish == Finish.LENGTH else "stop"
