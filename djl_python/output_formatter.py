"""The mark of a function that changes what the model itself has answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def output_formatter(function: F) -> F:
    """`function(response_data: dict) -> dict | str`, called with an answer, or each record of a
    stream."""
    function.is_output_formatter = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
