"""Stop texts: where an answer ends because of what it says."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a stream of text at the first stop text, and never lets a part of one through.

    Text that may turn out to be the start of a stop text is held back until it is known.
    """

    def __init__(self, texts: Sequence[str], *, include: bool = False) -> None:
        """include: the stop text itself is let through, as the last of the text."""
        self._texts = tuple(texts)
        self._include = include
        self._held = ""
        self._num_exempt = 0
        """Characters at the start of the held text in which no stop text may end."""
        self.reached = False

    def push(self, text: str, *, exempt: bool = False) -> str:
        """The part of the text that is now certain; all up to the stop text once `reached`.

        exempt: a stop text that ends in this text does not count.
        """
        if self.reached:
            return ""
        self._held += text
        if exempt:
            self._num_exempt = len(self._held)
        found = [place for stop in self._texts if (place := self._find(stop)) is not None]
        if found:
            self.reached = True
            start, end = min(found)
            released, self._held = self._held[: end if self._include else start], ""
            return released
        cut = len(self._held) - num_doubtful(self._held, self._texts)
        released, self._held = self._held[:cut], self._held[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return released

    def flush(self) -> str:
        """What is held back, once no more text can come."""
        released, self._held = self._held, ""
        return released

    def _find(self, stop: str) -> tuple[int, int] | None:
        """Where the first that counts starts and ends in the held text."""
        start = self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))
        return None if start < 0 else (start, start + len(stop))


def num_doubtful(text: str, wanted: Sequence[str]) -> int:
    """Length of the longest end of the text that begins, but is not yet, one of the wanted."""
    longest = max(map(len, wanted), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[-size:]) for each in wanted):
            return size
    return 0
