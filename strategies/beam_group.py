"""The beams of one beam search, as a sequence group. All beams advance in the same steps."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from core.beams import Beam, BeamSearch, Candidates, Hypotheses, Hypothesis
from core.output import Output
from core.plan import StepResult
from core.request import Request
from core.sampling import Finish, Sampled
from core.sequence import Sequence
from strategies.group import SequenceGroup, Turn, chunk_length
from strategies.memory.base import KVMemory


class BeamGroup(SequenceGroup):
    """Starts with one sequence. From the first step on, it has one for each live beam.

    ```
    step k     beam 0   beam 1   beam 2      The sequence ids are fixed: one for each slot of the
                │  └──────┐ └──x   │         search. `KVMemory.reassign` gives each slot the K/V of
    step k+1   beam 0   beam 1   beam 2      the beam it continues, and frees beams that end.
    ```

    Which beam each slot continues is known only at commit. So no step of the group is scheduled
    while another of its steps is in flight.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request, request.sequences)
        self.sequence_ids = request.sequence_ids
        self._search = BeamSearch(request.params, self.sequences[0].stop_token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    def turns(self, budget: int) -> list[Turn]:
        if any(sequence.num_in_flight for sequence in self.sequences):
            return []
        num_pending = sum(sequence.num_pending_tokens for sequence in self.sequences)
        if self._is_sharing or num_pending <= budget:
            return super().turns(budget)
        turns: list[Turn] = []
        # Too much for one step. First compute all but each beam's last token: these last tokens
        # must go into the same step.
        for sequence in self.sequences:
            length = chunk_length(sequence, sequence.num_pending_tokens - 1, budget)
            if length > 0:
                turns.append((sequence, length))
                budget -= length
        return turns

    def commit(self, result: StepResult, memory: KVMemory) -> list[Output]:
        sampled = [result[sequence.id] for sequence in self.sequences]
        if isinstance(sampled[0], Hypotheses):
            return self._end_all(sampled[0].best, memory)
        self._search.advance([beam for beam in sampled if isinstance(beam, Candidates)])
        if self._search.is_done:
            return self._end_all(self._search.hypotheses, memory)
        parents, beams = self.sequences, self._search.beams
        slots = list(zip(self.sequence_ids, beams, strict=False))
        memory.reassign(
            self.sequence_ids,
            {id: parents[beam.parent].id for id, beam in slots},
            parents[0].num_computed_tokens,
        )
        self.sequences = [_child(parents[beam.parent], id, beam) for id, beam in slots]
        return []

    def end(self, sequence: Sequence, finish: Finish, memory: KVMemory) -> None:
        super().end(sequence, finish, memory)
        if not self.sequences:
            for sequence_id in self.sequence_ids:  # including those reserved for later beams
                memory.release(sequence_id)

    def _end_all(self, hypotheses: Tokens[Hypothesis], memory: KVMemory) -> list[Output]:
        for sequence in tuple(self.sequences):
            self.end(sequence, Finish.STOP, memory)
        return self.request.best_outputs(hypotheses)


def _child(parent: Sequence, id: int, beam: Beam) -> Sequence:
    child = parent.fork(id)
    child.append(Sampled(beam.token_ids[-1:], beam.logprobs[-1:]))
    return child
