"""The new tokens of one answer, on their way from a strategy to an API."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.protocol.stats import Receipt, Timing
from core.sampling import Finish, TopLogprobs


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one answer, or logprobs of the prompt.

    `finish` is set only in the last output of an answer. Finish.ERROR ends the whole request,
    whatever the index.
    """

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | None = None
    index: int = 0
    """Index of the answer, below `SamplingParams.num_answers`."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One per token, if the request has `logprobs`."""
    prompt_logprobs: tuple[TopLogprobs, ...] = ()
    """Logprobs of prompt tokens from the prompt's second token on, if the request has
    `prompt_logprobs`. Successive outputs continue each other."""
    admitted: float | None = None
    """When the request was admitted. None only with Finish.ERROR."""
    failure: str = ""
    """The reason, with Finish.ERROR."""
    failed_field: str = ""
    """With Finish.ERROR, the field of SamplingParams that is at fault, if the request is."""
    timing: Timing | None = None
    """Set by the server on the last output of an answer, before the output is sent."""
    receipt: Receipt | None = None
    """What the request has cost, on its last output, with option.receipts."""


def joined(parts: Sequence[Output]) -> Output:
    """Return successive outputs of one answer as one."""
    return msgspec.structs.replace(
        parts[-1],
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        top_logprobs=tuple(token for part in parts for token in part.top_logprobs),
        prompt_logprobs=tuple(token for part in parts for token in part.prompt_logprobs),
    )
