"""What a request asks of decoding, and why a sequence ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

import msgspec

from core.checked import Checked
from core.errors import RequestError
from core.structured_outputs import StructuredOutputsParams

MAX_SEED = 2**63 - 1
MAX_SAMPLES = 128
FIELDS_OF_BEAM_SEARCH = frozenset({
    "temperature", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "stop", "n", "best_of",
    "num_beams", "use_beam_search", "length_penalty", "early_stopping", "priority", "cache_salt",
    "truncate_prompt_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output",
})  # fmt: skip
MIN_TEMPERATURE = 1e-5
"""Below it a temperature is 0: dividing by less leaves the range of fp32."""
MAX_TEMPERATURE = 1e30
MAX_BIAS = 1e6
"""Far beyond any logit, and far from the limits of fp32."""
MAX_LOGPROBS = 20
"""Most likely tokens told of each place; vLLM's and OpenAI's limit."""
NO_LIMIT = 2**31 - 1
"""As `max_tokens`: as many as fit into the model's length."""


class Finish(StrEnum):
    """Why a sequence ended, in LMI's words."""

    EOS = "eos_token"
    STOP = "stop_sequence"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The token in a place beside the most likely ones there, under the unfiltered model."""

    logprob: float
    """Of the token in that place, in nats."""
    rank: int
    """Of the same; 1 is the most likely token."""
    token_ids: tuple[int, ...]
    """Most likely first, as many as were asked for."""
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next tokens of one sequence with their log-probabilities, in nats.

    One token from the packed executor; the whole answer from the library executor; none from a
    chunk that only scores the prompt.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()
    """One a token, where the request wants `logprobs`."""
    prompt: tuple[TopLogprobs, ...] = ()
    """The next tokens of the prompt, from its second on, where it wants `prompt_logprobs`."""
    ends: bool = False
    """The last of the tokens completes what a grammar describes, so nothing can follow it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why no next token of a sequence could be chosen: its request fails."""

    reason: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=Checked):
    """How the next tokens of one request are chosen. Names and defaults are vLLM's.

    Applied in this order, each to what the one before has left (engine/sampling):
    `allowed_token_ids`; `bad_words`, `no_repeat_ngram_size`, `min_tokens`, `logit_bias`;
    repetition, frequency and presence penalty; `structured_outputs`; temperature; `min_p`,
    `top_k`, `top_p`, `typical_p`. Tokens that are equally likely are kept or dropped together.

    Raises RequestError, naming the field, for an unknown one and for a value of the wrong type
    or out of range.
    """

    _if_none: ClassVar[Mapping[str, object]] = {"max_tokens": NO_LIMIT}
    _other_names: ClassVar[Mapping[str, str]] = {"guided_decoding": "structured_outputs"}

    temperature: float = 1.0
    """0 is greedy: the most likely token, always."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens that has at least this probability."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely in proportion to the most likely one."""
    typical_p: float = 1.0
    """Keep the smallest set with this probability of tokens whose surprise is nearest to the
    expected one (Meister et al., 2022)."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the answer so far become less likely (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer has so far."""
    frequency_penalty: float = 0.0
    """The same for each time that the answer has them."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that are generated, its end tokens included."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or their tokens, that the answer must not contain: the last token is impossible
    where the others stand before it in the answer. core/text/bad_words.py finds the tokens."""
    no_repeat_ngram_size: int = 0
    """Above 0: so many tokens in a row stand once in prompt and answer together, not twice
    (transformers' parameter)."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer must look like. It ends where nothing can follow, also with `ignore_eos` or
    before `min_tokens`; and where all that it allows is forbidden by the others, it wins."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch."""
    max_tokens: int = 16
    """Most tokens to generate; to the constructor None is as many as fit."""
    min_tokens: int = 0
    """Nothing ends the answer before it has this many: its end tokens are impossible, and stop
    texts do not count."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token; for measurements with fixed lengths."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own end-of-sequence tokens."""
    stop: str | tuple[str, ...] = ()
    """A text, or several, that end the answer; they are not part of it."""
    include_stop_str_in_output: bool = False
    """The stop text is part of the answer."""
    skip_special_tokens: bool = True
    """Special tokens have no text."""
    spaces_between_special_tokens: bool = True
    """Special tokens that follow each other are spaced as the tokenizer does."""
    logprobs: int | None = None
    """Tell of each token its rank, and this many most likely tokens."""
    prompt_logprobs: int | None = None
    """The same for the prompt, from its second token on."""
    truncate_prompt_tokens: int | None = None
    """Use this many tokens of the prompt, the last ones; -1: as many as leave room to answer."""
    n: int = 1
    """Answers to the one prompt."""
    best_of: int | None = None
    """Answers to sample; the `n` of them with the highest log-probability are told, best first,
    when all have ended. Default: n, told as they come."""
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
        _require(
            0 <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            "must be 0 or more, at most 1e30",
        )
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", "must be -1 or more")
        _require(0 <= self.min_p <= 1, "min_p", "must be 0 to 1")
        _require(0 < self.typical_p <= 1, "typical_p", "must be above 0 and at most 1")
        _require(
            0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "must be 0.01 to 100"
        )
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "must be -2 to 2")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "must be -2 to 2")
        _require(
            all(abs(bias) <= MAX_BIAS for bias in self.logit_bias.values()),
            "logit_bias",
            "must be -1e6 to 1e6",
        )
        _require(self.allowed_token_ids != (), "allowed_token_ids", "must have at least one")
        _require(all(self.bad_words), "bad_words", "a word must not be empty")
        _require(self.no_repeat_ngram_size >= 0, "no_repeat_ngram_size", "must be 0 or more")
        _require(
            self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"must be 0 to {MAX_SEED}"
        )
        self._check_lengths()
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
        _require(
            self.best_of in (None, self.beam_width), "best_of", "says another width than num_beams"
        )
        for name, default in _defaults().items():
            if name not in FIELDS_OF_BEAM_SEARCH:
                same = getattr(self, name) == default
                _require(same, name, "does not go with beam search")

    def _check_lengths(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be 0 to max_tokens")
        for field, count in (
            ("logprobs", self.logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ):
            _require(count is None or 0 <= count <= MAX_LOGPROBS, field, f"0 to {MAX_LOGPROBS}")
        keep = self.truncate_prompt_tokens
        _require(
            keep is None or keep == -1 or keep >= 1, "truncate_prompt_tokens", "-1, or at least 1"
        )

    @property
    def needs_newest_token(self) -> bool:
        """Whether the host chooses with the newest token, which must have left the device."""
        return self.structured_outputs is not None or self.no_repeat_ngram_size > 0

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
    def num_answers(self) -> int:
        """Answers that the engine tells: all samples, which are ranked where their text is known
        (core/text/answers.py), or the best hypotheses of a beam search."""
        return self.n if self.beam_width else self.num_samples

    @property
    def is_ranked(self) -> bool:
        """Whether answers are told only when all have ended, the likeliest first."""
        return self.best_of is not None and self.num_answers > 1

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def truncated(self, prompt_token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        """What `truncate_prompt_tokens` leaves of a prompt; the same if it is done again."""
        keep = self.truncate_prompt_tokens
        if keep == -1:
            answer = 1 if self.max_tokens == NO_LIMIT else self.max_tokens
            keep = max(1, max_model_len - answer)
        return prompt_token_ids if keep is None else prompt_token_ids[-keep:]


def _defaults() -> dict[str, object]:
    return {
        item.name: item.default if item.default is not msgspec.NODEFAULT else item.default_factory()
        for item in msgspec.structs.fields(SamplingParams)
    }


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise RequestError(field, message)
