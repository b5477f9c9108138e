"""Caches the values that wrappers compute from shapes and strides, for all layers and steps.

The host must launch kernels faster than the GPU runs them; see `benchmarks.engine.host_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

MAX_KEPT = 512
"""Maximum cached results of a function. The layers of a step share one result. A step with another
number of tokens needs another result."""

P = ParamSpec("P")
R = TypeVar("R")


class LaunchPlan(NamedTuple):
    """A launch without its tensors."""

    grid: tuple[int, ...]
    scalars: tuple[int, ...]
    """Integer arguments, passed by position after all others."""
    options: dict[str, Any]
    """The kernel's constants and Triton's options."""


def planned(function: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of `function` by the shapes, strides and types of its tensors.

    Other arguments are compared by value. All arguments are positional. `function` must not depend
    on a tensor's contents or address.
    """
    results: dict[Hashable, R] = {}

    @wraps(function)
    def look_up(*arguments: P.args, **keywords: P.kwargs) -> R:
        assert not keywords, "arguments are positional"
        key = tuple(
            [
                (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
                for value in arguments
            ]
        )
        try:
            return results[key]
        except KeyError:
            pass
        if len(results) >= MAX_KEPT:
            results.clear()
        result = results[key] = function(*arguments)
        return result

    return look_up
