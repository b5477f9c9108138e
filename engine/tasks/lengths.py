"""Check the length of texts against a model's limit.

On a GPU a text that is too long indexes beyond the position table and kills the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import RequestError


def num_positions(model: Any) -> int | None:
    """Return the maximum tokens that the model's position table allows; None without a table."""
    positions: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if positions and padding is not None:
        positions -= padding + 1  # RoBERTa counts positions from padding_idx + 1
    return positions or None


def longest_text(tokenizer: Any, model: Any) -> int:
    """Return the maximum tokens that both the tokenizer and the model's position table allow."""
    # A tokenizer without a limit has model_max_length 10^30.
    return min(num_positions(model) or tokenizer.model_max_length, tokenizer.model_max_length)


def check_length(
    texts: Mapping[str, str], tokenizer: Any, model: Any, field: str, hint: str = ""
) -> None:
    """Raise RequestError for `field` if the tokenized texts exceed the model's limit.

    texts: arguments of the tokenizer, by name. hint: the end of the error message.
    """
    num_tokens = len(tokenizer(**texts, verbose=False)["input_ids"])
    limit = longest_text(tokenizer, model)
    if num_tokens > limit:
        raise too_long(field, num_tokens, limit, hint)


def too_long(field: str, num_tokens: int, limit: int, hint: str = "") -> RequestError:
    """Return the error for texts beyond the model's limit."""
    return RequestError(field, f"has {num_tokens} tokens; the model takes {limit}{hint}")


@dataclass(frozen=True, slots=True)
class Windows:
    """How to split a context that is longer than a model's limit. All numbers are tokens."""

    length: int
    """The length of a window, which begins with the question."""
    room: int
    """The part of a window that is left for the context."""
    stride: int
    """The number of tokens that a window shares with the one before it."""

    def count(self, num_tokens: int) -> int:
        """Return the number of windows of a context."""
        return 1 + max(0, -(-(num_tokens - self.room) // (self.room - self.stride)))


def plan_windows(tokenizer: Any, question: str, length: int, stride: int) -> Windows:
    """Return windows of `length` tokens that overlap by `stride` tokens, or by less.

    Each window begins at least an eighth of its length after the one before it, so that the windows
    of a context have at most eight times its tokens.

    Raises RequestError if the question leaves the context less than a quarter of a window.
    """
    num_tokens = len(tokenizer.tokenize(question))
    room = length - num_tokens - tokenizer.num_special_tokens_to_add(pair=True)
    if room < max(2, length // 4):
        raise RequestError(
            "inputs.question",
            f"has {num_tokens} tokens, which leaves less than a quarter of a window of {length} "
            "tokens for the context; shorten it, or raise parameters.max_seq_len if it is set",
        )
    return Windows(length, room, min(stride, length // 2, room - max(1, length // 8)))
