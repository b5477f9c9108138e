"""Checks a request against the facts of the engine, in the worker and for `LLM` in the engine."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

import msgspec

from core.errors import RequestError
from core.protocol.facts import Facts
from core.sampling import NO_LIMIT, SamplingParams


def checked(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    facts: Facts,
    *,
    prompt: str = "prompt",
) -> SamplingParams:
    """Return the parameters, with `max_tokens` as many as fit if the request leaves it open.

    prompt: the name of the client's field with the prompt, for the texts of errors.

    Raises RequestError if the engine can never run the request. Its field is `prompt` or one of
    SamplingParams.
    """
    room = _room(prompt_token_ids, facts)
    if params.max_tokens == NO_LIMIT:
        params = msgspec.structs.replace(params, max_tokens=room)
    if params.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{too_long(facts.max_model_len)}; {prompt} has {len(prompt_token_ids)} of them, so "
            f"{params.max_tokens} is more than the {room} that remain",
        )
    limited = (_WITH_TOKEN_IDS | facts.unavailable.keys()).intersection(params.changed)
    if limited:
        _check_limited(limited, params, facts)
    return params


_WITH_TOKEN_IDS = frozenset({"logit_bias", "allowed_token_ids", "bad_words"})


def too_long(max_model_len: int) -> str:
    """Return OpenAI's wording of the error for a request that is too long.

    Clients such as litellm recognize it and choose a model with more context.
    """
    return f"this model's maximum context length is {max_model_len} tokens (option.max_model_len)"


def _room(prompt_token_ids: Sequence[int], facts: Facts) -> int:
    """Return how many tokens an answer to the prompt may have."""
    num_tokens, limit = len(prompt_token_ids), facts.max_model_len
    if not 0 < num_tokens < limit:
        raise _no_room(num_tokens, limit)
    _check_range("prompt", prompt_token_ids, facts.vocab_size)
    return limit - num_tokens


def _no_room(num_tokens: int, limit: int) -> RequestError:
    """Return the error for a prompt of so many tokens, which leaves no room for an answer."""
    if num_tokens == 0:
        return RequestError("prompt", "has no tokens")
    return RequestError(
        "prompt", f"{too_long(limit)}, and {num_tokens} tokens leave no room for an answer"
    )


def _check_limited(fields: Container[str], params: SamplingParams, facts: Facts) -> None:
    """Check the parameters that the model limits. fields: those that the request sets."""
    vocab_size = facts.vocab_size
    _check_range("logit_bias", params.logit_bias, vocab_size)
    _check_range("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in params.bad_words:
        if isinstance(word, str):
            raise RequestError("bad_words", "needs the model's tokenizer.json; give token ids")
        _check_range("bad_words", word, vocab_size)
    for field, reason in facts.unavailable.items():
        if field in fields:
            raise RequestError(field, reason)


def _check_range(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    if len(token_ids) and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError(field, f"token ids are 0 to {vocab_size - 1}")
