"""Longshore: a serving container for language models in which batching is a choice.

`longshore serve` starts it, and `LLM` runs a model without a server (docs/without-a-client.md).
The public names are those of `engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import engine as public

if TYPE_CHECKING:
    from engine import *  # noqa: F403

__all__: list[str] = []
__all__ += public.__all__


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)
