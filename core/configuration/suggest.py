"""Suggests the nearest known name for a misspelled one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"`, or `""` if no known name is similar."""
    by_folded = {_fold(candidate): candidate for candidate in known}
    near = difflib.get_close_matches(_fold(name), by_folded, n=1, cutoff=0.6)
    return f"; did you mean '{by_folded[near[0]]}'?" if near else ""


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
