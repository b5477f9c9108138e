"""Stop texts: where an answer ends because of what it says."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a stream of text at the first stop text, and never lets a part of one through.

    Text that may turn out to be the start of a stop text is held back until it is known.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.reached = False

    def push(self, text: str) -> str:
        """The part of the text that is now certain; all before the stop text once `reached`."""
        if self.reached:
            return ""
        self._held += text
        found = [at for stop in self._texts if (at := self._held.find(stop)) >= 0]
        if found:
            self.reached = True
            released, self._held = self._held[: min(found)], ""
            return released
        cut = len(self._held) - self._num_doubtful()
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        """What is held back, once no more text can come."""
        released, self._held = self._held, ""
        return released

    def _num_doubtful(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max(map(len, self._texts), default=0) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._texts):
                return size
        return 0
