"""A part of a sequence: what one feature adds to it. A feature of an engine makes such parts.

A plain sequence has none, and nobody who schedules it knows one part from another: it asks all of
them. Code of a feature finds its own part with `of`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, ClassVar, Self

from core.sampling import SamplingParams

if TYPE_CHECKING:
    from core.protocol.stats import Info, Total

NO_ROWS = range(0)


class Part:
    """The answers of a feature that changes nothing. A feature overrides those that it changes."""

    __slots__ = ()

    salt: str = ""
    """Sequences share cached blocks only if the salts of their parts are equal. A salt names its
    feature, and has no `|`."""
    needs_newest: bool = False
    """Whether the host needs the newest token to sample the next one. If so, the sequence is not
    scheduled while that token is in flight."""

    def chunk_end(self, end: int) -> int:
        """Return the last position up to `end` where a chunk may end."""
        return end

    def content(self, start: int, end: int) -> bytes:
        """Return what the tokens `start : end` stand for, as far as their ids do not tell."""
        return b""

    def extra_rows(self, start: int, end: int) -> range:
        """Return the positions in `start : end` whose logits the part wants, but has not had.

        The last position of a sequence, from which a token is sampled, is none of them. Tokens from
        the first of them on are computed even if their K/V are cached.
        """
        return NO_ROWS

    def seek(self, position: int) -> None:
        """Count the rows before `position` as had, and those from there on as not."""

    def fork(self) -> Part:
        """Return the part for a further sequence with the same prompt."""
        return self

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Self | None:
        """Return the part of this kind, if it is one of `parts`."""
        return next((part for part in parts if isinstance(part, cls)), None)


class Feature:
    """Something that requests of an engine may use."""

    fields: ClassVar[tuple[str, ...]] = ()
    """The sampling parameters that ask for it. `part` is called if one is not at its default."""

    def part(self, params: SamplingParams, num_prompt_tokens: int) -> Part | None:
        """Return a request's part, or None if its sampling parameters do not use the feature.

        Raises LongshoreError if the request cannot use it.
        """
        return None

    def info(self, running: Collection[Part], waiting: Collection[Part]) -> Info | None:
        """Return what metrics show of the parts of running and of waiting requests."""
        return None

    def totals(self) -> tuple[Total, ...]:
        """Return what metrics count of the feature since the start."""
        return ()

    @classmethod
    def of(cls, features: Iterable[Feature]) -> Self | None:
        """Return the feature of this kind, if it is one of `features`."""
        return next((feature for feature in features if isinstance(feature, cls)), None)
