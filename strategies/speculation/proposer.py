"""The interface of proposers: where drafts come from."""

from __future__ import annotations

from collections.abc import Sequence as Steps
from typing import ClassVar, NamedTuple, Protocol

from core.sequence import Sequence


class Proposal(NamedTuple):
    tokens: tuple[int, ...] = ()
    match: int = 0
    """How many of the sequence's newest tokens were found where these tokens come from. The best
    sign, before anything was verified, of how likely they are right."""
    num_unread: int = 0
    """How many tokens a model has to read first."""


NO_PROPOSAL = Proposal()


class Lookup(Protocol):
    """Proposes the tokens of one sequence."""

    def propose(self, count: int) -> Proposal:
        """Return up to `count` tokens that may follow the sequence's known tokens."""
        ...

    def end(self) -> None:
        """Called when the sequence has ended, and its tokens may serve others."""
        ...


class Wanted(NamedTuple):
    """Drafts of a sequence that are to be verified."""

    lookup: Lookup
    num_in_flight: int
    """Proposed tokens before them."""
    drafts: tuple[int, ...]
    """The first of those that were proposed after these."""


class Proposer(Protocol):
    is_model: ClassVar[bool] = False
    """Whether a model samples the drafts. Then how likely they are right changes slowly, while a
    text may begin to repeat at any step."""

    def begin(self, sequence: Sequence) -> Lookup:
        """Return a lookup for a sequence, to which it must not refer after `end`."""
        ...

    def completed(self, wanted: Steps[Wanted]) -> list[tuple[int, ...]]:
        """Return the drafts of a step. Those of a lookup may be open until then, or become fewer.

        Here: as they were proposed.
        """
        return [one.drafts for one in wanted]
