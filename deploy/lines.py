"""Lines of a stream that comes in parts, such as the PayloadParts of SageMaker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def whole_lines(parts: Iterable[bytes]) -> Iterator[str]:
    """The lines of UTF-8 that is cut anywhere, also within a character; the last may lack its end.

    A line ends with `\\n` alone: JSON may hold what `str.splitlines` would take for an end.
    """
    pending: list[bytes] = []
    for part in parts:
        first, *others = part.split(b"\n")
        pending.append(first)
        for other in others:
            yield b"".join(pending).decode()
            pending = [other]
    if last := b"".join(pending):
        yield last.decode()
