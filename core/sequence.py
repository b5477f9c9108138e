"""A sequence: the tokens of one request, and how far their K/V are computed."""

from __future__ import annotations

from collections.abc import Collection

from core.sampling import Finish, Sampled, SamplingParams


class Sequence:
    """One request inside the engine. Owned and changed by its strategy alone.

    ```
    token_ids   |<------- prompt ------->|<-- generated -->|
                |<-- computed -->|<------- pending ------->|
    ```
    """

    __slots__ = (
        "arrival",
        "finish",
        "id",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        id: int,
        prompt_token_ids: Collection[int],
        params: SamplingParams,
        *,
        arrival: float = 0.0,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.id = id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.params = params
        self.arrival = arrival
        self.stop_token_ids = _stop_reasons(params, eos_token_ids)
        self.finish: Finish | None = None

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose K/V are not in the cache yet: a prompt's, or the newest one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and of the longest answer it may get."""
        return self.num_prompt_tokens + self.params.max_tokens

    def append(self, sampled: Sampled) -> int:
        """Appends sampled tokens until one of them ends the sequence; returns how many."""
        for count, token_id in enumerate(sampled.token_ids, start=1):
            self.token_ids.append(token_id)
            self.finish = self.stop_token_ids.get(token_id)
            if self.finish is None and len(self.token_ids) >= self.max_length:
                self.finish = Finish.LENGTH
            if self.finish is not None:
                return count
        return len(sampled.token_ids)


def _stop_reasons(params: SamplingParams, eos_token_ids: Collection[int]) -> dict[int, Finish]:
    eos = () if params.ignore_eos else eos_token_ids
    return dict.fromkeys(params.stop_token_ids, Finish.STOP) | dict.fromkeys(eos, Finish.EOS)
