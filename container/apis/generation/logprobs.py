"""Logprobs in the formats of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from container.apis.generation.reply import Record
from container.http.off_loop import in_thread_if_long
from core.sampling import TopLogprobs
from core.text.answer import TokenText


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token at its place in a text, with its logprob and the most likely tokens there."""

    token_id: int
    offset: int
    """Number of characters before the token."""
    logprob: float | None
    """None for the first token of a prompt, which no token precedes."""
    top_logprobs: TopLogprobs | None = None


def scored_answer_tokens(tokens: Sequence[TokenText], offset: int) -> Iterator[ScoredToken]:
    """Yield the tokens of an answer, or of a part of it that starts at `offset`."""
    for token in tokens:
        yield ScoredToken(token.id, offset, token.logprob, token.top_logprobs)
        offset += len(token.text)


def completion_logprobs(
    tokens: Sequence[ScoredToken], num_top: int, name: Callable[[int], str]
) -> Record:
    """Return `logprobs` of OpenAI's completions, with `num_top` likely tokens at each position.

    name: returns the string for a token id. All lists name a token by the same string, so that
    clients can look tokens up.
    """

    def record() -> Record:
        return {
            "tokens": [name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_name(token, num_top, name) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    return in_thread_if_long(record, size=len(tokens) * (num_top + 1))


def chat_logprobs(tokens: Sequence[TokenText], name: Callable[[int], str]) -> list[Record]:
    """Return logprobs as OpenAI's chat completions and responses have them: a record per token.

    Each record lists all the likely tokens that the engine returned for its position.
    """
    return [
        {
            **_chat_logprob(name(token.id), token.logprob),
            "top_logprobs": [
                _chat_logprob(name(token_id), logprob)
                for token_id, logprob in _likely(token.top_logprobs)
            ],
        }
        for token in tokens
    ]


def _likely(top: TopLogprobs | None) -> Iterator[tuple[int, float]]:
    return zip(top.token_ids, top.logprobs, strict=True) if top else iter(())


def _by_name(token: ScoredToken, num_top: int, name: Callable[[int], str]) -> Record | None:
    """Return logprobs by token name, including the token's own; None if the token has none."""
    if token.logprob is None:
        return None
    logprobs: Record = {name(token.token_id): token.logprob}
    for token_id, logprob in list(_likely(token.top_logprobs))[:num_top]:
        logprobs.setdefault(name(token_id), logprob)
    return logprobs


def _chat_logprob(piece: str, logprob: float) -> Record:
    """Return one token's record. `bytes` is None if the token is only part of a character."""
    is_whole = "\ufffd" not in piece
    return {
        "token": piece,
        "logprob": logprob,
        "bytes": list(piece.encode()) if is_whole else None,
    }
