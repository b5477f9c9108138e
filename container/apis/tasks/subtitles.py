"""Subtitles of a transcript, as SubRip (srt) and WebVTT (vtt) files."""

from __future__ import annotations

from collections.abc import Sequence

from core.protocol.task_bodies import Span


def as_srt(spans: Sequence[Span]) -> str:
    """Return a SubRip file with a cue for each span."""
    cues = [
        f"{number}\n{_time(span.start, ',')} --> {_time(span.end, ',')}\n{_line(span)}\n"
        for number, span in enumerate(spans, 1)
    ]
    return "\n".join(cues)


def as_vtt(spans: Sequence[Span]) -> str:
    """Return a WebVTT file with a cue for each span."""
    cues = [
        f"{_time(span.start, '.')} --> {_time(span.end, '.')}\n{_line(span)}\n" for span in spans
    ]
    return "\n".join(["WEBVTT\n", *cues])


def _line(span: Span) -> str:
    """Return the text on one line. An empty line would end the cue, and `-->` would begin one."""
    return " ".join(span.text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{milliseconds:03}"
