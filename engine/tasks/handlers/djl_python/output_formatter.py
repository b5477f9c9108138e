"""The decorator for a function that postprocesses answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def output_formatter(function: F) -> F:
    """Mark an output formatter: `function(response_data: dict | list) -> dict | list | str`.

    It is called with each record of a stream, or with a whole answer, which is a list for several
    inputs and with option.tgi_compat. A str is sent unchanged.
    """
    function.is_output_formatter = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
