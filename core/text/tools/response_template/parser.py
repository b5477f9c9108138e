"""Parses an answer by a response template while it streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import regex

from core.text.reasoning.base import Reasoning
from core.text.tools.base import ToolCall
from core.text.tools.response_template.arguments import calls_of, properties_of
from core.text.tools.response_template.content import TIMEOUT_S, field_value
from core.text.tools.response_template.template import Field, Mark, ResponseTemplate

Part = Reasoning | str | ToolCall
_KEPT = 256
"""Parsed characters that stay, for patterns that look behind."""


class _Found(NamedTuple):
    """A mark in the text."""

    start: int
    end: int
    opens: Field | None
    """The field that it opens; None: it closes the open one."""
    captures: Mapping[str, str]


class ResponseParser:
    """Parses one answer. A call that is not valid stays text, with its marks."""

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """prompt: at least the end of the prompt; '' if it writes no part of the answer.

        tools: their schemas say which types the arguments of calls have. None: calls stay text.
        """
        self.special_tokens = template.special_tokens
        self._template = template
        self._properties = None if tools is None else properties_of(tools)
        self._text, self._at = "", 0
        """The text that is not dropped yet, and where in it parsing goes on."""
        self._field = template.implicit
        self._is_open = False
        """Whether the field has been opened: the implicit one is by its first character."""
        self._captures: Mapping[str, str] = {}
        self._body = ""
        """The field's text since its mark. Of a field that streams, blanks that may be its end."""
        self._raw_mark = ""
        """The field's opening mark."""
        self._filled = set[str]()
        """Fields that have some text."""
        self._join = ""
        """Comes before the next text of the open field."""
        self._empty_mark = -1
        """Where the last mark of no characters was found."""
        self._gives_up = False
        """Whether no marks are looked for any more, as that takes too long or for ever."""
        self._read_prompt(prompt)

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._is_open and self._field is not None and self._field.role == "reasoning"

    def push(self, text: str) -> list[Part]:
        """Add text and return the parts that can no longer change, in order."""
        self._text += text
        return self._advance(is_last=False)

    def flush(self) -> list[Part]:
        """Return the parts that are still held back at the end of the answer."""
        return self._advance(is_last=True)

    def _read_prompt(self, prompt: str) -> None:
        """Start in the state after what the prompt has written of the message."""
        anchor = self._template.anchor
        starts = [match.end() for match in anchor.finditer(prompt)] if anchor else []
        if starts:
            self.push(prompt[starts[-1] :])
            self._text, self._at, self._body = "", 0, ""

    def _advance(self, *, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            found, hold = self._find(is_last=is_last)
            end = hold if found is None else found.start
            if end > self._at:
                parts += self._take(self._text[self._at : end])
                self._at = end
            if found is None:
                break
            mark = self._text[found.start : found.end]
            parts += self._close("" if found.opens else mark)
            self._at = found.end
            if found.opens is not None:
                self._open(found.opens, found.captures, mark)
        if is_last:
            parts += self._close("")
        drop = max(0, self._at - _KEPT)
        self._text, self._at = self._text[drop:], self._at - drop
        self._empty_mark = -1
        return parts

    def _find(self, *, is_last: bool) -> tuple[_Found | None, int]:
        """Return the first mark that is certain, and where text begins that may become one.

        Of marks at the same place the longest counts, and an opening one before a closing one.
        """
        best: _Found | None = None
        hold = len(self._text)
        for mark, opens in self._marks():
            match = self._search(mark, may_go_on=not is_last)
            if match is None:
                continue
            start, end = match.span()
            at_edge = end == len(self._text) and (mark.may_grow or start == end)
            if not is_last and (match.partial or at_edge):
                hold = min(hold, start)
                continue
            named = {key: value for key, value in match.groupdict().items() if value is not None}
            found = _Found(start, end, opens, named)
            if best is None or _order(found) < _order(best):
                best = found
        if best is None or best.start >= hold:
            return None, hold
        if best.start == best.end:
            self._gives_up |= best.start == self._empty_mark
            self._empty_mark = best.start
        return best, hold

    def _search(self, mark: Mark, *, may_go_on: bool) -> regex.Match[str] | None:
        """Return where the mark is. may_go_on: or where it may be once there is more text."""
        if self._gives_up:
            return None
        try:
            return mark.pattern.search(self._text, self._at, partial=may_go_on, timeout=TIMEOUT_S)
        except TimeoutError:
            self._gives_up = True
            return None

    def _marks(self) -> list[tuple[Mark, Field | None]]:
        """Return the marks to look for: a field that has an opening mark knows only its end."""
        field, implicit = self._field, self._template.implicit
        marks: list[tuple[Mark, Field | None]] = []
        if field is implicit:
            marks += [(f.opening, f) for f in self._template.fields if f.opening is not None]
        if field is not None and field.closing is not None:
            marks.append((field.closing, None))
        return marks

    def _open(self, field: Field, captures: Mapping[str, str], mark: str) -> None:
        self._field, self._captures, self._raw_mark = field, captures, mark
        self._is_open = True
        self._join = field.join or "" if field.name in self._filled else ""

    def _take(self, text: str) -> list[Part]:
        """Add text to the open field and return what is certain of its value."""
        field = self._field
        if field is None:
            return []
        self._is_open = True
        self._body += text
        if not field.streams:
            return []
        strips = field.content_args.get("strip", True)
        if strips and field.name not in self._filled:
            self._body = self._body.lstrip()
        ready = self._body.rstrip() if strips else self._body
        self._body = self._body[len(ready) :]
        return self._text_parts(field, ready)

    def _close(self, mark: str) -> list[Part]:
        """Close the open field and return its value. mark: the text that closes it."""
        field, body, is_open = self._field, self._body, self._is_open
        raw = self._raw_mark + body + mark
        captures = self._captures
        self._field, self._is_open = self._template.implicit, False
        self._captures, self._body, self._raw_mark = {}, "", ""
        if field is None or not is_open or field.streams:
            return []
        try:
            value = field_value(field, body, captures)
            if field.role == "calls":
                return [*self._calls(value)]
        except Exception:  # a template may be wrong in many ways; the answer is still shown
            self._filled.add("content")
            return [raw]
        return self._text_parts(field, value if isinstance(value, str) else raw)

    def _calls(self, value: object) -> list[ToolCall]:
        if self._properties is None:
            raise ValueError("the request has no tools")
        return calls_of(value, self._properties)

    def _text_parts(self, field: Field, text: str) -> list[Part]:
        """Return a piece of a field's text as parts."""
        if not text or field.role == "other":
            return []
        self._filled.add(field.name)
        text, self._join = self._join + text, ""
        return [Reasoning(text) if field.role == "reasoning" else text]


def _order(found: _Found) -> tuple[int, int, bool]:
    return found.start, found.start - found.end, found.opens is None
