"""Check the length of texts against a model's limit.

On a GPU a text that is too long indexes beyond the position table and kills the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import RequestError


def longest_text(tokenizer: Any, model: Any) -> int:
    """Return the maximum tokens that both the tokenizer and the model's position table allow."""
    positions: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if positions and padding is not None:
        positions -= padding + 1  # RoBERTa counts positions from padding_idx + 1
    # A tokenizer without a limit has model_max_length 10^30.
    return min(positions or tokenizer.model_max_length, tokenizer.model_max_length)


def check_length(
    texts: Mapping[str, str], tokenizer: Any, model: Any, field: str, hint: str = ""
) -> None:
    """Raise RequestError for `field` if the tokenized texts exceed the model's limit.

    texts: arguments of the tokenizer, by name. hint: the end of the error message.
    """
    num_tokens = len(tokenizer(**texts, verbose=False)["input_ids"])
    limit = longest_text(tokenizer, model)
    if num_tokens > limit:
        raise RequestError(field, f"has {num_tokens} tokens; the model takes {limit}{hint}")
