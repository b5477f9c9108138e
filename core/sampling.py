"""What a request asks of decoding, and why a sequence ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from core.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_SAMPLES = 128
FIELDS_OF_BEAM_SEARCH = frozenset({
    "temperature", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "stop", "n", "best_of",
    "num_beams", "use_beam_search", "length_penalty", "early_stopping", "priority", "cache_salt",
})  # fmt: skip
MIN_TEMPERATURE = 1e-5
"""Below it a temperature is 0: dividing by less leaves the range of fp32."""


class Finish(StrEnum):
    """Why a sequence ended, in LMI's words."""

    EOS = "eos_token"
    STOP = "stop_sequence"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next tokens of one sequence with their log-probabilities, in nats.

    One token from the packed executor; the whole answer from the library executor.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next tokens of one request are chosen. Names and defaults are vLLM's.

    Filters apply in the order repetition penalty, temperature, top-k, top-p, as in
    transformers. Raises RequestError, naming the field, where a value is out of range.
    """

    temperature: float = 1.0
    """0 is greedy: the most likely token, always."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens that has at least this probability."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the answer so far become less likely (CTRL, 2019)."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch."""
    max_tokens: int = 16
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token; for measurements with fixed lengths."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own end-of-sequence tokens."""
    stop: str | tuple[str, ...] = ()
    """A text, or several, that end the answer; they are not part of it."""
    n: int = 1
    """Answers to the one prompt."""
    best_of: int | None = None
    """Answers to sample; the `n` of them with the highest log-probability are told, when all have
    ended. Default: n, told as they come."""
    num_beams: int = 1
    """Above 1: beam search with so many beams; the `n` best are told at the end."""
    use_beam_search: bool = False
    """Beam search of width `best_of`, unless `num_beams` says another."""
    length_penalty: float = 1.0
    """Beam search: a hypothesis scores its log-probability over its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """Beam search: true ends it with the first hypothesis of the last beam; "never" only once no
    longer answer can score higher; false by a guess between the two, as in transformers."""
    priority: int = 0
    """Requests of a lower number are admitted first and preempted last; equal ones in order of
    arrival."""
    cache_salt: str = ""
    """Only requests with the same one share what prefix caching keeps; one for each tenant, so
    that none learns from response times what another has asked."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < float("inf"), "temperature", "must be 0 or more")
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", "must be -1 or more")
        _require(
            0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "must be 0.01 to 100"
        )
        _require(
            self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"must be 0 to {MAX_SEED}"
        )
        _require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(all(self.stop_texts), "stop", "a stop text must not be empty")
        _require(1 <= self.num_beams <= MAX_SAMPLES, "num_beams", f"must be 1 to {MAX_SAMPLES}")
        _require(1 <= self.n <= MAX_SAMPLES, "n", f"must be 1 to {MAX_SAMPLES}")
        _require(
            self.n <= self.num_samples <= MAX_SAMPLES, "best_of", f"must be n to {MAX_SAMPLES}"
        )
        if self.beam_width:
            self._check_beams()

    def _check_beams(self) -> None:
        """Refuses what beam search would ignore."""
        _require(
            self.n <= self.beam_width <= MAX_SAMPLES, "num_beams", f"must be n to {MAX_SAMPLES}"
        )
        _require(self.temperature in (0, 1), "temperature", "does not go with beam search")
        for name, default in _defaults().items():
            if name not in FIELDS_OF_BEAM_SEARCH:
                same = getattr(self, name) == default
                _require(same, name, "does not go with beam search")

    @property
    def is_greedy(self) -> bool:
        is_drawn = not (self.use_beam_search or self.beam_width)
        return not is_drawn or self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def beam_width(self) -> int:
        """Beams of a beam search; 0: none. One beam alone is greedy decoding."""
        width = self.num_samples if self.use_beam_search else 1
        width = self.num_beams if self.num_beams != 1 else width
        return width if width != 1 else 0

    @property
    def num_samples(self) -> int:
        """Answers to sample, told or not."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _defaults() -> dict[str, object]:
    return {item.name: item.default for item in msgspec.structs.fields(SamplingParams)}


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise RequestError(field, message)
