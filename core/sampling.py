"""Sampling parameters, sampled tokens, and finish reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

import msgspec

from core.configuration.checked import Checked
from core.errors import RequestError
from core.structured_outputs import StructuredOutputsParams

MAX_INT64 = 2**63 - 1
"""The greatest integer that fits into a message between the processes."""
MAX_SEED = MAX_INT64
MAX_SAMPLES = 128
FIELDS_OF_BEAM_SEARCH = frozenset({
    "temperature", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "stop", "n", "best_of",
    "num_beams", "use_beam_search", "length_penalty", "early_stopping", "priority", "cache_salt",
    "truncate_prompt_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "detokenize",
})  # fmt: skip
MIN_TEMPERATURE = 1e-5
"""Lower temperatures count as 0: logits divided by them would leave the range of fp32."""
MAX_TEMPERATURE = 1e30
MAX_BIAS = 1e6
"""Far larger than any logit, and far below the limits of fp32."""
MAX_LENGTH_PENALTY = 32
"""A score is divided by the length to this power. Lengths are below 2**31, so the divisor is from
2**-992 to 2**992, which floats can represent: it is never 0 and never overflows."""
MAX_LOGPROBS = 20
"""The highest `logprobs`; also vLLM's and OpenAI's limit."""
NO_LIMIT = 2**31 - 1
"""The value of `max_tokens` that stands for as many tokens as fit into max_model_len."""


BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "top_k": (-1, NO_LIMIT),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "no_repeat_ngram_size": (0, NO_LIMIT),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, NO_LIMIT),
    "min_tokens": (0, NO_LIMIT),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "truncate_prompt_tokens": (-1, NO_LIMIT),
    "n": (1, MAX_SAMPLES),
    "best_of": (1, MAX_SAMPLES),
    "num_beams": (1, MAX_SAMPLES),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "priority": (-MAX_INT64, MAX_INT64),
}
"""The least and the greatest value of every field that is a number. The schemas of the APIs have
them from here. NO_LIMIT, where nothing smaller follows from the model, is the greatest 32-bit
number: no context and no vocabulary has more tokens."""


class Finish(StrEnum):
    """Finish reasons, with LMI's names."""

    EOS = "eos_token"
    STOP = "stop_sequence"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @property
    def public_name(self) -> str:
        """The name in OpenAI's API, which vLLM's metrics and OpenTelemetry use too."""
        return "stop" if self in (Finish.EOS, Finish.STOP) else self.value


Operation = Literal["chat", "text_completion"]
"""OpenTelemetry's names for requests that generate text."""


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The logprobs at one position: of the token there, and of the most likely tokens.

    They are the model's own, before temperature, penalties and other logits processors.
    """

    logprob: float
    """Logprob of the token at that position, in nats."""
    rank: int
    """Rank of the same token; 1 is the most likely."""
    token_ids: tuple[int, ...]
    """The most likely tokens, most likely first. The request's `logprobs` says how many."""
    logprobs: tuple[float, ...]


class ChunkResult:
    """What a step found out for one chunk: one of its subclasses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Sampled(ChunkResult):
    """The next tokens of one sequence with their logprobs, in nats.

    The packed executor returns one token, the library executor the whole answer. A chunk that only
    scores the prompt has no next token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One per token, if the request has `logprobs`."""
    prompt_logprobs: tuple[TopLogprobs, ...] = ()
    """Logprobs of prompt tokens, from the prompt's second token on, if the request has
    `prompt_logprobs`."""
    ends_answer: bool = False
    """Whether nothing can follow the last token, as it completes the answer's grammar."""


@dataclass(frozen=True, slots=True)
class SequenceFailure(ChunkResult):
    """No next token of a sequence could be sampled, so its request fails."""

    reason: str
    field: str = ""
    """The field of SamplingParams that is at fault, if the request is."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=Checked):
    """Sampling parameters of one request.

    Names and defaults are vLLM's or, for parameters that vLLM does not have, transformers'. The
    parameters are applied in this order, each to the result of the previous one (engine/sampling):
    `allowed_token_ids`; `bad_words`, `no_repeat_ngram_size`, `min_tokens`, `logit_bias`;
    repetition, frequency and presence penalty; `structured_outputs`; temperature; `min_p`,
    `top_k`, `top_p`, `typical_p`. Tokens of equal probability are kept or dropped together.

    The constructor raises RequestError, naming the field, for an unknown field and for a value of
    the wrong type or out of range.
    """

    _if_none: ClassVar[Mapping[str, object]] = {"max_tokens": NO_LIMIT}
    _other_names: ClassVar[Mapping[str, str]] = {"guided_decoding": "structured_outputs"}

    temperature: float = 1.0
    """0 is greedy decoding: always the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this total probability."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    typical_p: float = 1.0
    """Locally typical sampling (Meister et al., 2022): of the tokens whose information content is
    nearest to the entropy, keep the smallest set with at least this total probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the answer so far become less likely (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each occurrence in the answer so far."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Generate only these tokens. Include the end token if the answer may end with it."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or their tokens, that the answer must not contain. The last token of a word is
    forbidden after its other tokens. core/text/bad_words.py converts texts to tokens."""
    no_repeat_ngram_size: int = 0
    """Above 0: no n-gram of this size occurs twice in prompt and answer together (transformers'
    parameter)."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constrains the form of the answer. The answer ends when nothing can follow, even with
    `ignore_eos` or before `min_tokens`. If the other parameters forbid every token that the
    grammar allows, the grammar wins."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch."""
    max_tokens: int = 16
    """Maximum tokens to generate. None in the constructor: as many as fit into max_model_len."""
    min_tokens: int = 0
    """Generate at least this many tokens: until then, end tokens are forbidden and stop strings are
    ignored."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token, for measurements with fixed lengths."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, in addition to the model's end-of-sequence tokens."""
    stop: str | tuple[str, ...] = ()
    """One or more strings that end the answer. The answer does not include them."""
    include_stop_str_in_output: bool = False
    """Include the stop string in the answer."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between adjacent special tokens where the tokenizer does."""
    detokenize: bool = True
    """Return text. If False, an answer has only token ids, and its text is empty."""
    logprobs: int | None = None
    """Return the logprob and rank of each token, and this many most likely tokens."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, but for the tokens of the prompt, from the second one on."""
    truncate_prompt_tokens: int | None = None
    """Use only this many tokens from the end of the prompt. -1: use as many as leave room for the
    answer."""
    n: int = 1
    """Number of answers to return."""
    best_of: int | None = None
    """Number of answers to sample. When all have ended, the `n` answers with the highest logprob
    are returned, best first. Default: n, and answers are returned as they are generated."""
    num_beams: int = 1
    """Above 1: beam search of this width. The `n` best answers are returned at the end."""
    use_beam_search: bool = False
    """Beam search of width `best_of`, unless `num_beams` sets the width."""
    length_penalty: float = 1.0
    """Beam search: a hypothesis scores its logprob divided by its length to this power, which is
    from -32 to 32."""
    early_stopping: bool | Literal["never"] = False
    """Beam search: true ends the search once there are as many hypotheses as beams; "never" ends it
    once no answer can score higher, however long it becomes; false uses a heuristic in between, as
    transformers does."""
    priority: int = 0
    """Requests with a lower number are admitted first and preempted last. Requests with equal
    numbers are served in order of arrival."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes. With one salt per tenant, no tenant
    can learn from response times what another has sent."""

    def __post_init__(self) -> None:
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _require(0 < self.typical_p <= 1, "typical_p", "must be above 0 and at most 1")
        for name, (least, greatest) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= greatest:  # true of NaN, too
                raise RequestError(name, f"must be {_text(least)} to {_text(greatest)}")
        _require(
            all(abs(bias) <= MAX_BIAS for bias in self.logit_bias.values()),
            "logit_bias",
            "must be -1e6 to 1e6",
        )
        _require(self.allowed_token_ids != (), "allowed_token_ids", "must have at least one")
        _require(all(self.bad_words), "bad_words", "a word must not be empty")
        self._check_lengths()
        _require(all(self.stop_strings), "stop", "a stop string must not be empty")
        _require(self.detokenize or not self.stop, "stop", "needs detokenize=true")
        _require(
            self.n <= self.num_samples <= MAX_SAMPLES, "best_of", f"must be n to {MAX_SAMPLES}"
        )
        if self.beam_width:
            self._check_beams()

    def _check_beams(self) -> None:
        """Reject parameters that beam search would ignore."""
        _require(
            self.n <= self.beam_width <= MAX_SAMPLES, "num_beams", f"must be n to {MAX_SAMPLES}"
        )
        _require(self.temperature in (0, 1), "temperature", "cannot be combined with beam search")
        _require(self.best_of in (None, self.beam_width), "best_of", "differs from num_beams")
        for name in self.changed:
            _require(name in FIELDS_OF_BEAM_SEARCH, name, "cannot be combined with beam search")

    def _check_lengths(self) -> None:
        _require(self.min_tokens <= self.max_tokens, "min_tokens", "must be 0 to max_tokens")
        _require(
            self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", "must be -1, or at least 1"
        )

    @property
    def changed(self) -> list[str]:
        """The names of the parameters that differ from their defaults."""
        names = self.__struct_fields__
        return [name for name in names if getattr(self, name) != getattr(DEFAULTS, name)]

    @property
    def is_greedy(self) -> bool:
        is_beam_search = self.use_beam_search or self.beam_width > 0
        return is_beam_search or self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def beam_width(self) -> int:
        """The width of the beam search; 0 without one. A single beam is greedy decoding."""
        width = self.num_samples if self.use_beam_search else 1
        width = self.num_beams if self.num_beams != 1 else width
        return width if width != 1 else 0

    @property
    def num_samples(self) -> int:
        """Answers to sample, returned or not."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_answers(self) -> int:
        """Answers that the engine reports: all samples, or the best hypotheses of a beam search.

        Samples are ranked outside the engine, where their text is known (core/text/answers.py).
        """
        return self.n if self.beam_width else self.num_samples

    @property
    def is_ranked(self) -> bool:
        """Whether answers are returned only when all have ended, the most likely first."""
        return self.best_of is not None and self.num_answers > 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def truncated(self, prompt_token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        """Apply `truncate_prompt_tokens` to a prompt. A second call would change nothing."""
        if self.truncate_prompt_tokens is None:
            return prompt_token_ids
        return prompt_token_ids[-self._num_kept(self.truncate_prompt_tokens, max_model_len) :]

    def _num_kept(self, keep: int, max_model_len: int) -> int:
        answer = 1 if self.max_tokens == NO_LIMIT else self.max_tokens
        return max(1, max_model_len - answer) if keep == -1 else keep


def _text(bound: float) -> str:
    return "1e30" if bound == MAX_TEMPERATURE else f"{bound}"


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise RequestError(field, message)


DEFAULTS = SamplingParams()
