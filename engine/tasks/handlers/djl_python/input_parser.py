"""The decorator for a function that preprocesses requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """Mark an input formatter: `function(decoded_payload: dict, tokenizer=None, **kwargs) -> dict`.

    It is called with each decoded request body and returns the body to use instead.
    """
    function.is_input_formatter = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
