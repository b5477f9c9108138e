"""The beams of one beam search, as a sequence group. All beams advance in the same steps."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from core.beams import Beam, BeamSearch, Candidates, Hypotheses, Hypothesis
from core.output import Output
from core.part import Feature
from core.plan import StepResult
from core.request import Request
from core.sampling import Finish, Sampled, SamplingParams
from core.sequence import Sequence
from strategies.group import Grouping, SharingGroup, Turn, chunk_length
from strategies.memory.base import KVMemory


class Beams(Grouping):
    def group(self, request: Request) -> BeamGroup:
        return BeamGroup(request)


class BeamSearches(Feature):
    fields = ("num_beams", "use_beam_search")

    def part(self, params: SamplingParams, num_prompt_tokens: int) -> Beams | None:
        return Beams() if params.beam_width else None


class BeamGroup(SharingGroup):
    """Starts with one sequence. From the first step on, it has one for each live beam.

    ```
    step k     beam 0   beam 1   beam 2      The sequence ids are fixed: one for each slot of the
                │  └──────┐ └──x   │         search. A slot whose beam ends forks from a beam that
    step k+1   beam 0   beam 1   beam 2      continues more than once.
    ```

    Which beam each slot continues is known only at commit. So no step of the group is scheduled
    while another of its steps is in flight.
    """

    is_indivisible = True

    def __init__(self, request: Request) -> None:
        super().__init__(request, request.sequences)
        self.sequence_ids = request.sequence_ids
        self.search = BeamSearch(request.params, self.sequences[0].stop_token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    @property
    def num_parents(self) -> int:
        """Beams with two children or more; the others take their parent's slot."""
        return len(self.sequence_ids) // 2

    @property
    def parents(self) -> list[int]:
        return [beam.parent for beam in self.search.beams]

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
        self.search.advance([beam for beam in sampled if isinstance(beam, Candidates)])
        if self.search.is_done:
            return self._end_all(self.search.hypotheses, memory)
        self.sequences = self._children(memory)
        return []

    def _children(self, memory: KVMemory) -> list[Sequence]:
        """Give each beam a slot: the first child of a beam its slot, the others free ones."""
        parents = [self.sequences[beam.parent] for beam in self.search.beams]
        kept = {parent.id for parent in parents}
        free = [id for id in self.sequence_ids if id not in kept]
        children: list[Sequence] = []
        for parent, beam in zip(parents, self.search.beams, strict=True):
            id = parent.id
            if id in kept:
                kept.remove(id)
            else:
                id = free.pop()
                memory.fork(parent.id, id, parent.num_computed_tokens)
            children.append(_child(parent, id, beam))
        return children

    def end(self, sequence: Sequence, finish: Finish, memory: KVMemory) -> None:
        super().end(sequence, finish, memory)
        if not self.sequences:
            for sequence_id in self.sequence_ids:  # including those reserved for later beams
                memory.release(sequence_id)

    def _end_all(self, hypotheses: Tokens[Hypothesis], memory: KVMemory) -> list[Output]:
        for sequence in tuple(self.sequences):
            # No next turn continues a beam, so none leaves its state.
            self.end(sequence, Finish.ABORT, memory)
        return [
            Output(
                self.request.id,
                hypothesis.token_ids,
                hypothesis.logprobs,
                hypothesis.finish,
                rank,
                admitted=self.request.admitted,
            )
            for rank, hypothesis in enumerate(hypotheses[: self.request.params.n])
        ]


def _child(parent: Sequence, id: int, beam: Beam) -> Sequence:
    child = parent.fork(id)
    child.append(Sampled(beam.token_ids[-1:], beam.logprobs[-1:]))
    return child
