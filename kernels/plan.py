"""What wrappers work out of their tensors' shapes: once for a shape, not in every layer and step.

The host must launch kernels faster than the GPU runs them; see `benchmarks.host_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

MOST_KEPT = 512
"""Results of one function. All layers of a step share theirs, and steps differ in their tokens."""

P = ParamSpec("P")
R = TypeVar("R")


class Plan(NamedTuple):
    """A launch, but for its tensors."""

    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    """Arguments by position, after all others."""
    options: dict[str, Any]
    """Constants of the kernel and Triton's options."""


def planned(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps what `function` gives for tensors of these shapes, strides and types.

    All else of its arguments, which are positional, is compared as it is. It must not read what is
    in a tensor, nor where it lies.
    """
    results: dict[Hashable, R] = {}

    @wraps(function)
    def look_up(*arguments: P.args, **keywords: P.kwargs) -> R:
        assert not keywords, "arguments are positional"
        key = tuple(
            [
                (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each
                for each in arguments
            ]
        )
        try:
            return results[key]
        except KeyError:
            pass
        if len(results) >= MOST_KEPT:
            results.clear()
        result = results[key] = function(*arguments)
        return result

    return look_up
