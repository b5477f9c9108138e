"""Suffix lookup: proposes what followed the longest run of newest tokens that was seen before.

It is looked for in the sequence's own prompt and answer, and in recent answers to others
(SuffixDecoding, arXiv:2411.04975). Only sequences with the same salt share answers, as they share
cached prefixes: otherwise one tenant could learn from response times what another was answered.
"""

from __future__ import annotations

from collections import OrderedDict

from core.sequence import Sequence
from strategies.speculation.automaton import SuffixAutomaton
from strategies.speculation.proposer import NO_PROPOSAL, Proposal, Proposer

SHORTEST_MATCH = 2
MOST_AT_ONCE = 1024
"""The most tokens that one call appends: some 2 ms. A longer prompt takes several steps."""
MOST_TOKENS = 32_768
"""The newest tokens of a prompt that are looked at. A token takes some 40 bytes."""
MOST_STATES = 4 * MOST_TOKENS
"""Of recent answers with one salt. A text beyond that begins anew."""
MOST_SALTS = 16


class SuffixProposer(Proposer):
    def __init__(self, per_match: float | None = None) -> None:
        """per_match: the most tokens proposed for each token of a match; None: no limit."""
        self._per_match = per_match
        self._recent: OrderedDict[str, SuffixAutomaton] = OrderedDict()
        """Recent answers by salt, the least recently used first."""

    def begin(self, sequence: Sequence) -> SuffixLookup:
        return SuffixLookup(sequence, self._answers(sequence.prefix_salt), self._per_match)

    def _answers(self, salt: str) -> SuffixAutomaton:
        answers = self._recent.get(salt)
        if answers is None or len(answers) > MOST_STATES:
            answers = self._recent[salt] = SuffixAutomaton()
        self._recent.move_to_end(salt)
        if len(self._recent) > MOST_SALTS:
            self._recent.popitem(last=False)
        return answers


class SuffixLookup:
    def __init__(
        self, sequence: Sequence, answers: SuffixAutomaton, per_match: float | None
    ) -> None:
        """answers: recent ones, to which this one is added in the end."""
        self._per_match = per_match
        self._tokens = sequence.token_ids
        self._start = sequence.num_prompt_tokens
        self._own = SuffixAutomaton()
        self._num_read = max(0, len(self._tokens) - MOST_TOKENS)
        self._answers = answers
        self._place = 0, 0
        """The state of the newest tokens among the answers, and how many of them it stands for."""

    def propose(self, count: int) -> Proposal:
        tokens = self._tokens
        end = min(len(tokens), self._num_read + MOST_AT_ONCE)
        for token in tokens[self._num_read : end]:
            self._own.append(token)
            self._place = self._answers.step(*self._place, token)
        self._num_read = end
        if end < len(tokens):
            return NO_PROPOSAL
        state, match = self._own.repeated
        text = self._own
        if self._place[1] > match:
            (state, match), text = self._place, self._answers
        if match < SHORTEST_MATCH:
            return NO_PROPOSAL
        if self._per_match is not None:
            count = min(count, int(self._per_match * match))
        return Proposal(text.follow(state, count), match)

    def end(self) -> None:
        """Add the answer to the recent ones."""
        for token in self._tokens[self._start :][:MOST_TOKENS]:
            self._answers.append(token)
        self._answers.append(SuffixAutomaton.SEPARATOR)
