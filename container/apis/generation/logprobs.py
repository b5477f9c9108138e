"""Log-probabilities in the shapes of OpenAI's APIs, and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from container.apis.generation.answer import Record
from core.sampling import TopLogprobs
from core.text.answer import TokenText
from core.text.detokenizer import Detokenizer
from core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Place:
    """A token where it stands, and what else might have stood there."""

    token_id: int
    offset: int
    """Characters of the text before it."""
    logprob: float | None
    """None for a prompt's first token, which follows nothing."""
    top: TopLogprobs | None = None


def places_of_prompt(
    token_ids: Sequence[int], scores: Sequence[TopLogprobs], text: str, tokenizer: Tokenizer
) -> list[Place]:
    """The tokens of a prompt of that text. `scores` are those from the second token on."""
    pushed, offsets, end = Detokenizer(tokenizer, skip_special_tokens=False), list[int](), 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(pushed.push(token_id))
    # Special tokens before the text, which the model expects, are no part of it.
    before = max(0, end - len(text))
    return [
        Place(token_id, max(0, offset - before), score and score.logprob, score)
        for token_id, offset, score in zip(token_ids, offsets, (None, *scores), strict=True)
    ]


def places_of_answer(tokens: Sequence[TokenText], offset: int) -> Iterator[Place]:
    """The tokens of an answer, or of a part of it that begins there."""
    for token in tokens:
        yield Place(token.id, offset, token.logprob, token.top)
        offset += len(token.text)


def completion_logprobs(places: Sequence[Place], width: int, tokenizer: Tokenizer) -> Record:
    """As in OpenAI's completions, with `width` likely tokens for each place.

    Tokens are spelt alike wherever they are named, so that clients can look them up.
    """
    piece = tokenizer.piece
    return {
        "tokens": [piece(each.token_id) for each in places],
        "token_logprobs": [each.logprob for each in places],
        "top_logprobs": [_by_piece(each, width, tokenizer) for each in places] if width else None,
        "text_offset": [each.offset for each in places],
    }


def chat_logprobs(tokens: Sequence[TokenText], tokenizer: Tokenizer) -> Record:
    """As in OpenAI's chat completions, with as many likely tokens as were asked for."""
    return {
        "content": [
            {
                **_chat_logprob(token.id, token.logprob, tokenizer),
                "top_logprobs": [
                    _chat_logprob(token_id, logprob, tokenizer)
                    for token_id, logprob in _likely(token.top)
                ],
            }
            for token in tokens
        ]
    }


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TopLogprobs], tokenizer: Tokenizer
) -> list[Record | None]:
    """As vLLM gives them: by token id, for each token of the prompt; null for the first."""
    named: list[Record | None] = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        ranked = [(token_id, score.logprob, score.rank)]
        ranked += [(*each, rank) for rank, each in enumerate(_likely(score), 1)]
        named.append(
            {
                str(id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.piece(id)}
                for id, logprob, rank in ranked
            }
        )
    return named


def _likely(top: TopLogprobs | None) -> Iterator[tuple[int, float]]:
    """The likeliest tokens of a place with their log-probabilities."""
    return zip(top.token_ids, top.logprobs, strict=True) if top else iter(())


def _by_piece(place: Place, width: int, tokenizer: Tokenizer) -> Record | None:
    """By token, the one in the place among them; None where nothing was computed."""
    if place.top is None:
        return None
    named: Record = {tokenizer.piece(place.token_id): place.logprob}
    for token_id, logprob in list(_likely(place.top))[:width]:
        named.setdefault(tokenizer.piece(token_id), logprob)
    return named


def _chat_logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> Record:
    """`bytes` is null where the token is only a part of a character."""
    piece = tokenizer.piece(token_id)
    is_whole = "\ufffd" not in piece
    return {
        "token": piece,
        "logprob": logprob,
        "bytes": list(piece.encode()) if is_whole else None,
    }
