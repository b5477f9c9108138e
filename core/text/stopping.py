"""Stop strings: texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence

from core.sampling import Finish
from core.text.answer import AnswerText
from core.text.detokenizer import Detokenization


class StoppableAnswer(AnswerText):
    """The text of an answer that ends at a stop string.

    There, `push` drops the tokens that follow, and sets `finish` to Finish.STOP. The caller must
    then abort the answer in the engine, unless the output has `finish`: the engine has already
    ended the answer then.
    """

    def __init__(self, detokenization: Detokenization) -> None:
        super().__init__(detokenization)
        params = detokenization.params
        self._stop = StopStrings(
            params.stop_strings, includes_stop=params.include_stop_str_in_output
        )
        self._num_exempt = params.min_tokens
        """How many of the next tokens no stop string may end in."""

    @property
    def stop_string(self) -> str | None:
        return self._stop.found

    def _text_of(self, token_id: int, is_last: bool) -> str:
        text = super()._text_of(token_id, is_last)
        released = self._stop.push(text, is_exempt=self._num_exempt > 0)
        self._num_exempt -= 1
        if self._stop.is_reached:
            self.finish = Finish.STOP
        return released + self._stop.flush() if is_last else released


class StopStrings:
    """Cuts a stream of text at the first stop string.

    It holds back text that may be the start of a stop string until later text decides.
    """

    def __init__(self, texts: Sequence[str], *, includes_stop: bool = False) -> None:
        """includes_stop: keep the stop string itself, at the end of the text."""
        self._texts = tuple(texts)
        self._includes_stop = includes_stop
        self._held = ""
        self._num_exempt = 0
        """Ignore stop strings that end within this many characters from the start of `_held`."""
        self.found: str | None = None
        """The stop string that has ended the text."""

    @property
    def is_reached(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.found is not None

    def push(self, text: str, *, is_exempt: bool = False) -> str:
        """Add text and return the text that can be released. Sets `found` at a stop string.

        is_exempt: ignore a stop string that ends in this text, as the answer is too short to end.
        """
        if self.is_reached:
            return ""
        self._held += text
        if is_exempt:
            self._num_exempt = len(self._held)
        spans = [span for stop in self._texts if (span := self._find(stop)) is not None]
        if spans:
            start, end = min(spans)
            self.found = self._held[start:end]
            released, self._held = self._held[: end if self._includes_stop else start], ""
            return released
        cut = len(self._held) - partial_match_length(self._held, self._texts)
        released, self._held = self._held[:cut], self._held[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return released

    def flush(self) -> str:
        """Return the text that is still held back when the answer ends."""
        released, self._held = self._held, ""
        return released

    def _find(self, stop: str) -> tuple[int, int] | None:
        """Return start and end of the first occurrence of `stop` in `_held` that is not exempt."""
        start = self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))
        return None if start < 0 else (start, start + len(stop))


def partial_match_length(text: str, targets: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of a target."""
    longest = max(map(len, targets), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(target.startswith(text[-size:]) for target in targets):
            return size
    return 0
