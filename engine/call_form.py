"""How the engine's steps call a layer: what a prepared one takes, and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention_backend import CpuBackend
from engine.paged_step import PagedStep
from kernels.cpu.prepared import AttentionInputs

HIDDEN, ANGLES = "hidden_states", "position_embeddings"
ABSENT = ("attention_mask", "past_key_values")
"""Keywords that must be None."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a layer is called, and returns."""

    names: frozenset[str]
    gives_tuple: bool

    def plain(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], dtype: torch.dtype
    ) -> dict[str, Any] | None:
        """All by name, if it is called as the engine's steps call it."""
        given = by_name(arguments, keywords)
        if len(arguments) > 1 or given.keys() != self.names:
            return None
        return given if _is_plain(given, dtype) else None

    def returned(self, hidden: Tensor) -> Any:
        return (hidden, None) if self.gives_tuple else hidden

    def hidden(self, returned: Any) -> Any:
        return returned[0] if self.gives_tuple else returned


def attention_inputs(keywords: Mapping[str, Any], layer: int) -> AttentionInputs:
    """Of one layer, by its index, in a plain call."""
    step: PagedStep = keywords["paged"]
    (cos, sin), cache = keywords[ANGLES], step.cache
    return AttentionInputs(cos, sin, cache.keys[layer], cache.values[layer], step.batch)


def by_name(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a call that may have given its hidden states, and nothing else, without one."""
    return {**dict(zip((HIDDEN,), arguments, strict=False)), **keywords}


def _is_plain(keywords: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether a layer is called as the engine's steps call it."""
    paged = keywords["paged"]
    tensors = keywords[HIDDEN], *keywords[ANGLES]
    return (
        isinstance(paged, PagedStep)
        and isinstance(paged.backend, CpuBackend)
        and all(fits(each, dtype) for each in tensors)
        and all(keywords.get(name) is None for name in ABSENT)
    )


def fits(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether they are those of one step, dense, and of this type."""
    return (
        rows.dtype == dtype
        and rows.ndim == 3
        and rows.shape[0] == 1
        and rows.is_contiguous()
        and not torch.compiler.is_compiling()
    )
