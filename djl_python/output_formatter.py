"""The decorator for a function that postprocesses answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def output_formatter(function: F) -> F:
    """Mark an output formatter: `function(response_data: dict) -> dict | str`.

    It is called with a whole answer, or with each record of a stream.
    """
    function.is_output_formatter = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
