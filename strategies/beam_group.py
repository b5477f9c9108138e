"""The beams of one search as a group: they take every step together."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from core.beams import Beam, BeamSearch, Candidates, Hypotheses, Hypothesis
from core.plan import Output, StepResult
from core.request import Request
from core.sampling import Finish, Sampled
from core.sequence import Sequence
from strategies.group import SequenceGroup, Turn
from strategies.memory.base import KVMemory


class BeamGroup(SequenceGroup):
    """Begins with one sequence; from the first step on it has one for each live beam.

    ```
    step k     beam 0   beam 1   beam 2      sequence ids and block tables stay with the places;
                │  └──────┐ └──x   │         a beam that goes on twice is forked, one that does
    step k+1   beam 0   beam 1   beam 2      not is freed, all by moving references
    ```

    Which beam continues which is known only at commit, so a step of theirs is never scheduled while
    another is in flight.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request, request.sequences)
        self.sequence_ids = request.sequence_ids
        self._search = BeamSearch(request.params, self.sequences[0].stop_token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    def turns(self, budget: int) -> list[Turn]:
        if any(each.num_in_flight for each in self.sequences):
            return []
        num_pending = sum(each.num_pending_tokens for each in self.sequences)
        if self._is_sharing or num_pending <= budget:
            return super().turns(budget)
        turns: list[Turn] = []
        for sequence in self.sequences:  # all but the last token, which they compute together
            length = min(sequence.num_pending_tokens - 1, budget)
            if length > 0:
                turns.append((sequence, length))
                budget -= length
        return turns

    def commit(self, result: StepResult, memory: KVMemory) -> list[Output]:
        sampled = [result[each.id] for each in self.sequences]
        if isinstance(sampled[0], Hypotheses):
            return self._end_all(sampled[0].best, memory)
        self._search.advance([each for each in sampled if isinstance(each, Candidates)])
        if self._search.is_over:
            return self._end_all(self._search.hypotheses, memory)
        parents, beams = self.sequences, self._search.beams
        places = list(zip(self.sequence_ids, beams, strict=False))
        memory.reassign(
            self.sequence_ids,
            {id: parents[beam.parent].id for id, beam in places},
            parents[0].num_computed_tokens,
        )
        self.sequences = [_child(parents[beam.parent], id, beam) for id, beam in places]
        return []

    def end(self, sequence: Sequence, finish: Finish, memory: KVMemory) -> None:
        super().end(sequence, finish, memory)
        if not self.sequences:
            for sequence_id in self.sequence_ids:  # also what is reserved for beams to come
                memory.release(sequence_id)

    def _end_all(self, hypotheses: Tokens[Hypothesis], memory: KVMemory) -> list[Output]:
        for sequence in tuple(self.sequences):
            self.end(sequence, Finish.STOP, memory)
        return self.request.tell_best(hypotheses)


def _child(parent: Sequence, id: int, beam: Beam) -> Sequence:
    child = parent.fork(id)
    child.append(Sampled(beam.token_ids[-1:], beam.logprobs[-1:]))
    return child
