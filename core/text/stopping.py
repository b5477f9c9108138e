"""Stop strings: end an answer at given texts."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text at the first stop string.

    Text that may be the start of a stop string is held back until that is decided.
    """

    def __init__(self, texts: Sequence[str], *, include: bool = False) -> None:
        """include: keep the stop string itself, at the end of the text."""
        self._texts = tuple(texts)
        self._include = include
        self._held = ""
        self._num_exempt = 0
        """A stop string that ends within this many first characters of `_held` is ignored."""
        self.reached = False

    def push(self, text: str, *, exempt: bool = False) -> str:
        """Add text and return what is certain by now. Sets `reached` at a stop string.

        exempt: ignore a stop string that ends in this text.
        """
        if self.reached:
            return ""
        self._held += text
        if exempt:
            self._num_exempt = len(self._held)
        found = [span for stop in self._texts if (span := self._find(stop)) is not None]
        if found:
            self.reached = True
            start, end = min(found)
            released, self._held = self._held[: end if self._include else start], ""
            return released
        cut = len(self._held) - partial_match_length(self._held, self._texts)
        released, self._held = self._held[:cut], self._held[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return released

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        released, self._held = self._held, ""
        return released

    def _find(self, stop: str) -> tuple[int, int] | None:
        """Return start and end of the first occurrence in the held text that is not exempt."""
        start = self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))
        return None if start < 0 else (start, start + len(stop))


def partial_match_length(text: str, targets: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of a target."""
    longest = max(map(len, targets), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(target.startswith(text[-size:]) for target in targets):
            return size
    return 0
