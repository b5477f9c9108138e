"""Sequence groups, of one prompt whose KV blocks they may share, and the budget they divide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from core.output import Output
from core.part import Part
from core.plan import StepResult
from core.request import Request
from core.sampling import Finish, Sampled
from core.sequence import Sequence
from strategies.memory.base import KVMemory

Turn = tuple[Sequence, int]
"""A sequence and the number of its pending tokens to compute next."""


class SequenceGroup:
    """The unit of admission and preemption (the PagedAttention paper, section 4.5)."""

    num_shared_tokens: int = 0
    """The first tokens of its sequences, which are the same; see `SharingGroup`."""
    is_indivisible: ClassVar[bool] = False
    """Whether its sequences run and end only together."""

    def __init__(self, request: Request, sequences: Iterable[Sequence]) -> None:
        self.request = request
        self.sequences = list(sequences)
        """The sequences that have not ended."""
        self.sequence_ids = tuple(sequence.id for sequence in self.sequences)
        self.rank = request.params.priority, self.sequences[0].id
        """Groups are served in ascending order of rank: priority, then arrival."""

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def num_parents(self) -> int:
        """The most sequences that others fork from before one step."""
        return int(len(self.sequences) > 1)

    @property
    def parents(self) -> list[int]:
        """For each sequence, the index that the one it continues had before the last commit."""
        return list(range(len(self.sequences)))

    @property
    def num_decoding(self) -> int:
        """The number of sequences with exactly one pending token."""
        return [sequence.num_pending_tokens for sequence in self.sequences].count(1)

    def turns(self, budget: int) -> list[Turn]:
        """Return the turns to compute next, with at most `budget` tokens in total."""
        if budget <= 0:
            return []
        turns: list[Turn] = []
        for sequence in self.sequences:
            length = chunk_length(sequence, sequence.num_pending_tokens, budget)
            if length > 0:
                turns.append((sequence, length))
                budget -= length
        return turns

    def commit(self, result: StepResult, memory: KVMemory) -> list[Output]:
        """Append the sampled tokens and free ended sequences. Returns outputs for the client."""
        outputs: list[Output] = []
        for sequence in tuple(self.sequences):
            sampled = result.get(sequence.id)
            if isinstance(sampled, Sampled):
                count = sequence.append(sampled) if sampled.token_ids else 0
                outputs.append(self.request.output(sequence, count, sampled))
                if sequence.finish is not None:
                    self.end(sequence, sequence.finish, memory)
        return outputs

    def end(self, sequence: Sequence, finish: Finish, memory: KVMemory) -> None:
        """Set the finish reason of a sequence, free its memory and remove it from the group."""
        sequence.finish = finish
        memory.end(sequence)
        self.sequences.remove(sequence)


class SharingGroup(SequenceGroup):
    """Sequences that share the K/V of their prompt.

    ```
    prompt      |<--- num_shared_tokens --->|1|      All but the last token is shared. Each
    sequence 0  |=========== computed ======|=|--▶   sequence computes the last token itself, to
    sequence 1  |      forked from 0        |=|--▶   sample from its logits.
    ```

    The first sequence computes the shared tokens, then the others fork from it. Fewer tokens are
    shared if no chunk may end before the last token (`Sequence.chunk_end`). If the group is
    preempted by recomputation, the same happens again. A single sequence shares nothing.
    """

    def __init__(self, request: Request, sequences: Iterable[Sequence]) -> None:
        super().__init__(request, sequences)
        first = self.sequences[0]
        self.num_shared_tokens = first.chunk_end(first.num_prompt_tokens - 1)

    @property
    def _is_sharing(self) -> bool:
        """Whether the first sequence is still computing the tokens that the others will share."""
        is_behind = self.sequences[0].num_computed_tokens < self.num_shared_tokens
        return is_behind and len(self.sequences) > 1

    def turns(self, budget: int) -> list[Turn]:
        if budget <= 0 or not self._is_sharing:
            return super().turns(budget)
        first = self.sequences[0]
        missing = self.num_shared_tokens - first.num_computed_tokens
        length = chunk_length(first, missing, budget)
        return [(first, length)] if length > 0 else []


class StepBudget:
    """The token budget of one step. Decoding sequences come before any chunk of a prompt.

    So a long prompt, however old or urgent, delays a running stream by at most one step.
    """

    def __init__(self, num_tokens: int, groups: Iterable[SequenceGroup]) -> None:
        self.num_left = num_tokens
        self._num_set_aside = sum(group.num_decoding for group in groups)
        """Tokens kept for decoding sequences of groups that have not had their turn yet."""

    def allowance(self, group: SequenceGroup) -> int:
        """Return how many tokens the group may take. Call once for each group, in order."""
        num_decoding = group.num_decoding
        self._num_set_aside -= num_decoding
        return max(self.num_left - self._num_set_aside, min(self.num_left, num_decoding))

    def take(self, num_tokens: int) -> None:
        self.num_left -= num_tokens


class Grouping(Part, ABC):
    """The part of a request whose sequences run in a group of their own kind."""

    __slots__ = ()

    @abstractmethod
    def group(self, request: Request) -> SequenceGroup:
        """Return one group with all sequences of the request."""


def whole_group(request: Request) -> SequenceGroup:
    """Return one group with all sequences of a request."""
    grouping = Grouping.of(request.parts)
    if grouping is not None:
        return grouping.group(request)
    kind = SequenceGroup if len(request.sequences) == 1 else SharingGroup
    return kind(request, request.sequences)


def chunk_length(sequence: Sequence, num_wanted: int, budget: int) -> int:
    """Return the length of a sequence's next chunk; 0 or less if none fits into the budget."""
    length = min(num_wanted, budget)
    start = sequence.num_computed_tokens
    return sequence.chunk_end(start + length) - start if sequence.parts else length
