"""Logprobs in the formats of OpenAI's APIs and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from container.apis.generation.reply import Record
from container.http.off_loop import in_thread_if_long
from core.sampling import TopLogprobs
from core.text.answer import TokenText
from core.text.detokenizer import Detokenizer
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token at its place in a text, with its logprob and the most likely tokens there."""

    token_id: int
    offset: int
    """Number of characters before the token."""
    logprob: float | None
    """None for the first token of a prompt, which no token precedes."""
    top_logprobs: TopLogprobs | None = None


def scored_prompt_tokens(
    token_ids: Sequence[int], scores: Sequence[TopLogprobs], text: str, tokenizer: Tokenizer
) -> list[ScoredToken]:
    """Return the tokens of a prompt with this text. `scores` start at the second token."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets, end = list[int](), 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(detokenizer.push(token_id))
    # Special tokens that the tokenizer added at the start are not part of the client's text.
    num_added = max(0, end - len(text))
    return [
        ScoredToken(token_id, max(0, offset - num_added), score and score.logprob, score)
        for token_id, offset, score in zip(token_ids, offsets, (None, *scores), strict=True)
    ]


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


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TopLogprobs], tokenizer: Tokenizer
) -> list[Record | None]:
    """Return vLLM's `prompt_logprobs`: None for the first token, then a record per token.

    The keys of a record are token ids: that of the token, and those of the most likely tokens.
    """

    def record(token_id: int, score: TopLogprobs) -> Record:
        ranked = [(token_id, score.logprob, score.rank)]
        ranked += [(*likely, rank) for rank, likely in enumerate(_likely(score), 1)]
        return {
            str(id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.piece(id)}
            for id, logprob, rank in ranked
        }

    def records() -> list[Record | None]:
        pairs = zip(token_ids[1:], scores, strict=True)
        return [None, *(record(token_id, score) for token_id, score in pairs)]

    num_logprobs = sum(1 + len(score.token_ids) for score in scores)
    return in_thread_if_long(records, size=num_logprobs)


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
