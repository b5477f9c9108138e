"""A sequence group: sequences of one prompt that run together and may share its K/V."""

from __future__ import annotations

from collections.abc import Iterable

from core.plan import Output, StepResult
from core.request import Request
from core.sampling import Finish, Sampled
from core.sequence import Sequence
from strategies.memory.base import KVMemory

Turn = tuple[Sequence, int]
"""A sequence, and how many of its pending tokens to compute next."""


class SequenceGroup:
    """What a strategy admits and preempts, as one (the PagedAttention paper, section 4.5).

    ```
    prompt      |<--- num_shared_tokens --->|1|      all but its last token, which each sequence
    sequence 0  |=========== computed ======|=|--▶   computes itself, to sample after it
    sequence 1  |      forked from 0        |=|--▶
    ```

    The first sequence computes what can be shared, then the others fork from it. After a
    preemption by recomputation the same happens again. With one sequence there is nothing to share.
    """

    def __init__(self, request: Request, sequences: Iterable[Sequence]) -> None:
        self.request = request
        self.sequences = list(sequences)
        """Those that have not ended."""
        self.sequence_ids = tuple(each.id for each in self.sequences)
        self.rank = request.params.priority, self.sequences[0].id
        """Whose turn comes first: the lowest."""
        self.num_shared_tokens = self.sequences[0].num_prompt_tokens - 1

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def num_decoding(self) -> int:
        """Sequences that wait for nothing but their next token."""
        return sum(each.num_pending_tokens == 1 for each in self.sequences)

    @property
    def _is_sharing(self) -> bool:
        """Whether the first sequence computes what the others wait for."""
        is_behind = self.sequences[0].num_computed_tokens < self.num_shared_tokens
        return is_behind and len(self.sequences) > 1

    def turns(self, budget: int) -> list[Turn]:
        """What to compute next, within a budget of tokens."""
        first = self.sequences[0]
        if budget <= 0:
            return []
        if self._is_sharing:
            return [(first, min(self.num_shared_tokens - first.num_computed_tokens, budget))]
        turns: list[Turn] = []
        for sequence in self.sequences:
            length = min(sequence.num_pending_tokens, budget)
            if length > 0:
                turns.append((sequence, length))
                budget -= length
        return turns

    def commit(self, result: StepResult, memory: KVMemory) -> list[Output]:
        """Appends what was sampled, frees what has ended; returns what the client hears."""
        outputs: list[Output] = []
        for sequence in tuple(self.sequences):
            sampled = result.get(sequence.id)
            if isinstance(sampled, Sampled):
                count = sequence.append(sampled) if sampled.token_ids else 0
                outputs.append(self.request.tell(sequence, count, sampled.prompt))
                if sequence.finish is not None:
                    self.end(sequence, sequence.finish, memory)
        return outputs

    def end(self, sequence: Sequence, finish: Finish, memory: KVMemory) -> None:
        sequence.finish = finish
        memory.release(sequence.id)
        self.sequences.remove(sequence)
