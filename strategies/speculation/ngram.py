"""Prompt lookup: proposes what followed an earlier occurrence of the newest tokens.

Of the last four occurrences of the newest two tokens, the one with the longest match wins; among
equal ones the latest. A single token matches too often: it doubles the drafts for hardly more
accepted tokens.
"""

from __future__ import annotations

from core.sequence import Sequence
from strategies.speculation.proposer import NO_PROPOSAL, Proposal, Proposer

MOST_OCCURRENCES = 4
"""The most occurrences that are compared."""
SHORTEST = 2
"""The fewest tokens of a match."""
MOST_COMPARED = 16
"""The most tokens of each that are compared."""
MOST_AT_ONCE = 4096
"""The most tokens that one call indexes: some 2 ms. A longer prompt takes several steps."""


class NgramProposer(Proposer):
    """Looks only at the sequence's own prompt and answer."""

    def __init__(self, shortest: int = SHORTEST, longest: int = MOST_COMPARED) -> None:
        """shortest, longest: how many tokens of a match are needed, and how many are compared."""
        self._lengths = max(SHORTEST, shortest), longest

    def begin(self, sequence: Sequence) -> NgramLookup:
        return NgramLookup(sequence.token_ids, *self._lengths)


class NgramLookup:
    def __init__(
        self, tokens: list[int], shortest: int = SHORTEST, longest: int = MOST_COMPARED
    ) -> None:
        """tokens: those of a sequence, which grow."""
        self._tokens = tokens
        self._shortest, self._longest = shortest, longest
        self._newest: dict[tuple[int, int], int] = {}
        """Maps a pair of tokens to the index after its last occurrence."""
        self._earlier: list[int] = [0, 0]
        """By such an index: that of the occurrence before, 0 if there is none."""

    def propose(self, count: int) -> Proposal:
        tokens = self._tokens
        self._index()
        if len(self._earlier) <= len(tokens) or len(tokens) < 2:
            return NO_PROPOSAL
        place, longest = self._best()
        if longest < self._shortest:
            return NO_PROPOSAL
        drafts: list[int] = []
        for index in range(place, place + count):  # may copy from the drafts themselves
            drafts.append(tokens[index] if index < len(tokens) else drafts[index - len(tokens)])
        return Proposal(tuple(drafts), longest)

    def end(self) -> None:
        """Do nothing: sequences share nothing."""

    def _index(self) -> None:
        tokens, earlier, newest = self._tokens, self._earlier, self._newest
        for end in range(len(earlier), min(len(tokens), len(earlier) + MOST_AT_ONCE) + 1):
            pair = tokens[end - 2], tokens[end - 1]
            earlier.append(newest.get(pair, 0))
            newest[pair] = end

    def _best(self) -> tuple[int, int]:
        """Return the index after the best earlier occurrence, and the length of its match."""
        place, best, longest = self._earlier[len(self._tokens)], 0, 0
        for _ in range(MOST_OCCURRENCES):
            if not place:
                break
            match = self._match(place)
            if match > longest:
                best, longest = place, match
            place = self._earlier[place]
        return best, longest

    def _match(self, place: int) -> int:
        """Return how many tokens before `place` equal the newest tokens."""
        tokens, length = self._tokens, 2
        while (
            length < self._longest
            and length < place
            and tokens[place - 1 - length] == tokens[-1 - length]
        ):
            length += 1
        return length
