"""The interface of proposers: where drafts come from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from core.sequence import Sequence


class Proposal(NamedTuple):
    tokens: tuple[int, ...] = ()
    match: int = 0
    """How many of the sequence's newest tokens were found where these tokens come from. The best
    sign, before anything was verified, of how likely they are right."""


NO_PROPOSAL = Proposal()


class Lookup(Protocol):
    """Proposes the tokens of one sequence."""

    def propose(self, count: int) -> Proposal:
        """Return up to `count` tokens that may follow the sequence's known tokens."""
        ...

    def end(self) -> None:
        """Called when the sequence has ended, and its tokens may serve others."""
        ...


class Proposer(Protocol):
    def begin(self, sequence: Sequence) -> Lookup:
        """Return a lookup for a sequence, to which it must not refer after `end`."""
        ...
