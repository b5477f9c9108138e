"""The new tokens of one answer, on their way from a strategy to an API."""

from __future__ import annotations

import msgspec

from core.protocol.stats import Timing
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
    timing: Timing | None = None
    """Set by the server on the last output of an answer, before the output is sent."""
