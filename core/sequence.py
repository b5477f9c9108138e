"""A sequence: a prompt and one answer, and how far their K/V are computed."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from copy import copy

from core.part import NO_ROWS, Part
from core.sampling import Finish, Sampled, SamplingParams, TopLogprobs


class Sequence:
    """One answer inside the engine. Only its strategy changes it.

    ```
    token_ids   |<------- prompt ------->|<-- generated -->| in flight |
                |<---- computed ---->|<------- pending -------->|
    ```

    Tokens count as computed once their step is scheduled, because later steps run after it. The
    token that a step samples is in flight until commit: its position is known, its value is not.
    """

    __slots__ = (
        "__weakref__",
        "end_token_ids",
        "finish",
        "id",
        "index",
        "logprobs",
        "max_length",
        "needs_newest_token",
        "num_computed_tokens",
        "num_in_flight",
        "num_prompt_tokens",
        "params",
        "parts",
        "prefix_salt",
        "stop_token_ids",
        "token_ids",
        "top_logprobs",
    )

    def __init__(
        self,
        id: int,
        prompt_token_ids: Collection[int],
        params: SamplingParams,
        *,
        index: int = 0,
        eos_token_ids: Collection[int] = (),
        parts: tuple[Part, ...] = (),
    ) -> None:
        self.id = id
        self.index = index
        """Index of the sample in its request."""
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_length = self.num_prompt_tokens + params.max_tokens
        """Tokens of the prompt and of the longest possible answer."""
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        """Tokens that scheduled steps have still to sample."""
        self.params = params
        self.parts = parts
        self.prefix_salt = "".join(part.salt for part in parts) + f"|{params.cache_salt}"
        """Sequences share cached blocks only if their salts are equal."""
        self.needs_newest_token = any(part.needs_newest for part in parts)
        self.logprobs: list[float] = []
        """Logprobs of the generated tokens, in nats."""
        self.top_logprobs: list[TopLogprobs] = []
        """The most likely tokens at the position of each generated token, if `logprobs` is set."""
        self.stop_token_ids = _stop_reasons(params, eos_token_ids)
        """Maps each token that ends the answer to the finish reason it gives."""
        self.end_token_ids = frozenset((*params.stop_token_ids, *eos_token_ids))
        """The request's stop tokens and, even with `ignore_eos`, the model's end-of-sequence
        tokens. None of them is sampled before `min_tokens`."""
        self.finish: Finish | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens plus the one in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute next: tokens of the prompt, or the newest token.

        0 if the sequence has its full length, or if the newest token is in flight and must be known
        before the next one can be sampled.
        """
        num_tokens = len(self.token_ids) + self.num_in_flight
        is_waiting = self.num_in_flight > 0 and self.needs_newest_token
        if is_waiting or num_tokens >= self.max_length:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def chunk_end(self, end: int) -> int:
        """Return the last position up to `end` where a chunk may end."""
        for part in self.parts:
            end = part.chunk_end(end)
        return end

    def content(self, start: int, end: int) -> bytes:
        """Return bytes that identify the tokens `start : end`."""
        ids = array("q", self.token_ids[start:end]).tobytes()
        return b"".join([ids, *(part.content(start, end) for part in self.parts)])

    def extra_rows(self, start: int, end: int) -> range:
        """Return the positions in `start : end` whose logits a part wants. Only one may."""
        for part in self.parts:
            if rows := part.extra_rows(start, end):
                return rows
        return NO_ROWS

    def seek(self, position: int) -> None:
        """Count the extra rows before `position` as scheduled, and those from there on as not."""
        for part in self.parts:
            part.seek(position)

    @property
    def num_skippable_tokens(self) -> int:
        """Tokens that need not be computed if their K/V are cached.

        These are all tokens before the first one whose logits are needed.
        """
        last = self.num_tokens - 1
        rows = self.extra_rows(0, last) if self.parts else NO_ROWS
        return rows.start if rows else last

    def fork(self, id: int) -> Sequence:
        """Return a copy with its own id, tokens and logprobs."""
        child = copy(self)
        child.id = id
        child.parts = tuple(part.fork() for part in self.parts)
        child.token_ids = list(self.token_ids)
        child.logprobs = list(self.logprobs)
        child.top_logprobs = list(self.top_logprobs)
        return child

    def append(self, sampled: Sampled) -> int:
        """Append sampled tokens until one of them ends the sequence. Return their number."""
        self.num_in_flight = max(0, self.num_in_flight - 1)
        if not sampled.token_ids:
            return 0
        count = self.num_kept(sampled.token_ids)
        self.token_ids += sampled.token_ids[:count]
        self.logprobs += sampled.logprobs[:count]
        self.top_logprobs += sampled.top_logprobs[:count]
        self.finish = self.stop_token_ids.get(self.token_ids[-1])
        if self.finish is None and sampled.ends_answer and count == len(sampled.token_ids):
            self.finish = Finish.EOS
        if self.finish is None and len(self.token_ids) >= self.max_length:
            self.finish = Finish.LENGTH
        return count

    def num_kept(self, token_ids: tuple[int, ...]) -> int:
        """Return how many of these next tokens there are up to the first that ends the answer."""
        room = max(0, self.max_length - len(self.token_ids))
        for count, token_id in enumerate(token_ids[:room], start=1):
            if token_id in self.stop_token_ids:
                return count
        return min(room, len(token_ids))


def _stop_reasons(params: SamplingParams, eos_token_ids: Collection[int]) -> dict[int, Finish]:
    eos = () if params.ignore_eos else eos_token_ids
    return dict.fromkeys(params.stop_token_ids, Finish.STOP) | dict.fromkeys(eos, Finish.EOS)
