"""The mark of a function that changes requests before the model itself answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """`function(decoded_payload: dict, tokenizer=None, **kwargs) -> dict`"""
    function.is_input_formatter = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
