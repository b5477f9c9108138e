"""Stop texts: where an answer ends because of what it says."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a stream of text at the first stop text, and never lets a part of one through.

    Text that may turn out to be the start of a stop text is held back until it is known.
    """

    def __init__(self, texts: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop text itself is let through, as the last of the text."""
        self._texts = tuple(texts)
        self._include = include
        self._held = ""
        self.reached = False

    def push(self, text: str) -> str:
        """The part of the text that is now certain; all up to the stop text once `reached`."""
        if self.reached:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._texts if (at := self._held.find(stop)) >= 0]
        if found:
            self.reached = True
            at, stop = min(found)
            released = self._held[:at] + (stop if self._include else "")
            self._held = ""
            return released
        cut = len(self._held) - num_doubtful(self._held, self._texts)
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        """What is held back, once no more text can come."""
        released, self._held = self._held, ""
        return released


def num_doubtful(text: str, wanted: Sequence[str]) -> int:
    """Length of the longest end of the text that begins, but is not yet, one of the wanted."""
    longest = max(map(len, wanted), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[-size:]) for each in wanted):
            return size
    return 0
