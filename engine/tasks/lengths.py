"""How long a text may be for a model, which on a GPU would take the whole process with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import RequestError


def longest_text(tokenizer: Any, model: Any) -> int:
    """The most tokens that tokenizer and model take; more would read beyond a table's end."""
    positions: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if positions and padding is not None:
        positions -= padding + 1  # RoBERTa begins to count after it
    # Without a limit of its own a tokenizer has one of 10^30.
    return min(positions or tokenizer.model_max_length, tokenizer.model_max_length)


def check_length(
    texts: Mapping[str, str], tokenizer: Any, model: Any, field: str, cure: str = ""
) -> None:
    """`texts` by the names of the tokenizer's arguments. Raises RequestError for too long ones."""
    num_tokens = len(tokenizer(**texts, verbose=False)["input_ids"])
    limit = longest_text(tokenizer, model)
    if num_tokens > limit:
        raise RequestError(field, f"has {num_tokens} tokens; the model takes {limit}{cure}")
