"""Finds the end of a list or object in a text that grows."""

from __future__ import annotations

import re

_JSON = re.compile(r'["\[\]{}]')
_PYTHON = re.compile(r'"""|\'\'\'|["\'()\[\]{}]')
_LONGEST_MARK = 3


class Brackets:
    """Finds where the first bracket of a text is closed, and reads each character only once.

    So the text has to be parsed once, not at every token. Brackets in strings do not count. Which
    kind of bracket closes which is not checked, as the parser checks it.
    """

    def __init__(self, *, is_python: bool = False) -> None:
        """is_python: strings and brackets are those of Python, else those of JSON."""
        self._is_python = is_python
        self._marks: re.Pattern[str] = _PYTHON if is_python else _JSON
        self._at: int = 0
        self._depth = 0
        self._quote: str = ""
        """The quotes that close the string at the current place; '' outside of strings."""
        self._end: int | None = None

    def end(self, text: str, start: int = 0) -> int | None:
        """Return the end of the bracket that opens at `start`, or None if it is still open.

        text: the text of the last call, and what has been added to it.
        """
        self._at = max(self._at, start)
        while self._end is None and (self._quote or self._at < len(text)):
            if self._quote and not self._leave_string(text):
                break
            mark = self._marks.search(text, self._at)
            if mark is None:
                self._at = len(text)
            elif mark[0][0] in "\"'":
                if self._is_python and len(text) < mark.start() + _LONGEST_MARK:
                    self._at = mark.start()
                    break  # it may become a quote of three characters
                self._at, self._quote = mark.end(), mark[0]
            else:
                self._at = mark.end()
                self._depth += 1 if mark[0] in "([{" else -1
                self._end = self._at if self._depth == 0 else None
        return self._end

    def _leave_string(self, text: str) -> bool:
        """Go to the end of the string. Returns False if the text ends before it."""
        mark_or_escape = re.compile(rf"\\.|{self._quote}", re.DOTALL)
        while found := mark_or_escape.search(text, self._at):
            self._at = found.end()
            if found[0] == self._quote:
                self._quote = ""
                return True
        # The last characters may be the start of an escape or of the quote.
        self._at = max(self._at, len(text) - _LONGEST_MARK + 1)
        return False
