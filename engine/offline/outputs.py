"""The outputs of `LLM`. Classes and fields are named as in vLLM if vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.sampling import MAX_LOGPROBS, Finish, SamplingParams, TopLogprobs
from core.text.answer import AnswerText, TokenText
from core.text.answers import Answers, Delta
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at one position."""

    logprob: float
    """Under the unfiltered model, in nats."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """None if the model has no tokenizer."""


Logprobs = dict[int, Logprob]
"""The token at a position and the most likely tokens there, by token id."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    """Sum over all generated tokens under the unfiltered model, in nats."""
    logprobs: list[Logprobs] | None
    """One per generated token; None unless `SamplingParams.logprobs` is set."""
    finish_reason: str
    """`stop` (end-of-sequence token or stop string) or `length`, as in vLLM and OpenAI."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    """After `SamplingParams.truncate_prompt_tokens`."""
    outputs: list[CompletionOutput]
    """The `n` answers; with `best_of` the best first."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One per prompt token, None for the first; None unless `SamplingParams.prompt_logprobs` is
    set."""
    finished: bool = True


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens of one answer."""

    prompt_index: int
    """Index of its prompt."""
    index: int
    """Index among the prompt's `n` answers."""
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    """Set on an answer's last delta, else None."""


def request_output(
    id: int,
    prompt: str | None,
    prompt_token_ids: list[int],
    answers: Answers,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """Convert a request whose answers have all ended."""
    scores = None
    if params.prompt_logprobs is not None:
        scores = _prompt_logprobs(prompt_token_ids, answers.prompt_logprobs, tokenizer)
    return RequestOutput(
        request_id=str(id),
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[
            _completion_output(index, answer, params, tokenizer)
            for index, answer in enumerate(answers.returned)
        ],
        prompt_logprobs=scores,
    )


def _completion_output(
    index: int, answer: AnswerText, params: SamplingParams, tokenizer: Tokenizer | None
) -> CompletionOutput:
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
    prompt_index: int, delta: Delta, params: SamplingParams, tokenizer: Tokenizer | None
) -> OutputDelta:
    """Convert new tokens of an answer to the prompt at `prompt_index`."""
    return OutputDelta(
        prompt_index=prompt_index,
        index=delta.index,
        text="".join(token.text for token in delta.tokens),
        token_ids=[token.id for token in delta.tokens],
        logprobs=_logprobs(delta.tokens, params, tokenizer),
        finish_reason=None if delta.finish is None else _finish_reason(delta.finish),
    )


def _prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TopLogprobs], tokenizer: Tokenizer | None
) -> list[Logprobs | None]:
    """Return the log-probabilities of each prompt token, with None for the first.

    scores: those of the second token and all later ones.
    """
    scored = zip(token_ids[1:], scores, strict=True)
    return [None, *(_by_token_id(token_id, score, tokenizer) for token_id, score in scored)]


def _logprobs(
    tokens: Sequence[TokenText], params: SamplingParams, tokenizer: Tokenizer | None
) -> list[Logprobs] | None:
    if params.logprobs is None:
        return None
    return [
        _by_token_id(token.id, token.top_logprobs, tokenizer)
        for token in tokens
        if token.top_logprobs is not None
    ]


def _by_token_id(token_id: int, top: TopLogprobs, tokenizer: Tokenizer | None) -> Logprobs:
    """Return the token at the position first, then the other tokens by rank."""
    ranked = [(token_id, top.logprob, top.rank)]
    ranked += zip(top.token_ids, top.logprobs, range(1, MAX_LOGPROBS + 1), strict=False)
    return {
        id: Logprob(logprob, rank, tokenizer.piece(id) if tokenizer else None)
        for id, logprob, rank in ranked
    }


def _finish_reason(finish: Finish) -> str:
    return "length" if finish == Finish.LENGTH else "stop"
