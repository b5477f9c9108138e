"""The extension of a strategy that adds drafts to its decodes, and commits those accepted.

```
plan      | t |              the strategy's chunk: the newest token
extended  | t | d d d d |    with drafts, in slots behind it
sampled     s   s s s s      after t and after each draft
kept        s = d d ≠ ✗      up to the first that differs from its draft
```

Drafts take only what a strategy's plan leaves: tokens of the step's budget, and free blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Chunks
from weakref import WeakKeyDictionary, WeakSet, ref

from msgspec.structs import replace

from core.configuration.step_size import MAX_DRAFTS
from core.output import Output
from core.plan import Chunk, StepResult
from core.sampling import ChunkResult, Sampled
from core.sequence import Sequence
from strategies.base import Limits
from strategies.memory.base import KVMemory, Span
from strategies.speculation.drafter import Drafter, longest_rest
from strategies.speculation.drafts import (
    DraftedChunk,
    drafted,
    is_verifiable,
    kept,
    some,
    with_tokens,
)
from strategies.speculation.pauses import Pauses
from strategies.speculation.policy import Candidate, Counts, Decision, Policy
from strategies.speculation.proposer import Proposer, Wanted

logger = logging.getLogger(__name__)

MOST_UNREAD = 1
"""Tokens that a draft model's first pass reads beside the newest, if it is to be timed."""


class Speculation:
    """See `strategies.base.Extension`."""

    def __init__(
        self, memory: KVMemory, limits: Limits, proposer: Proposer | None, num_draft_tokens: int
    ) -> None:
        """proposer: None if `drafts` is replaced.

        num_draft_tokens: the most drafts of a sequence in a step, up to MOST_DRAFTS.

        All drafts are verified, unless `policy` is replaced.
        """
        self.policy = Policy()
        self._memory = memory
        self._limits = limits
        self.proposer = proposer
        self._num_draft_tokens = num_draft_tokens
        self._drafters: WeakKeyDictionary[Sequence, Drafter | None] = WeakKeyDictionary()
        """None for a sequence whose tokens cannot be verified."""
        self._is_on = True
        self._drafted: WeakSet[Sequence] = WeakSet()
        """Those whose drafts are in flight."""
        self._has_drafted = False
        """Whether there may be any."""
        self._decision: Decision = "not_found"
        """The newest."""
        self._pauses = Pauses()
        self._completing = 0.0
        """Seconds in which the newest drafts were completed. `StepCosts` counts them apart."""
        self._timed: ref[Sequence] | None = None
        """To one of the step that is timed."""
        self.counts = Counts()

    @property
    def waits(self) -> bool:
        """Whether drafts are in flight: the next step depends on which of them are right.

        Other sequences wait, too: in turns, each half of the batch would take about as long as the
        whole, since a step reads all weights for either.
        """
        if self._has_drafted:
            self._has_drafted = any(
                each.finish is None and each.num_in_flight for each in self._drafted
            )
            if not self._has_drafted:
                self._drafted.clear()  # or steps without drafts would not overlap
        return self._has_drafted

    def extended(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return a step's chunks, some of them with drafts.

        A proposer that fails ends no request: from then on, nothing is drafted.
        """
        if not self._is_on:
            self.counts.steps["failed"] += 1
            return chunks
        if self._timed is not None:
            self._end_timed(self._timed(), chunks)
        if self._pauses.left and (decodes := _decodes(chunks)):
            self._pauses.count()
            self._count(self._decision, len(decodes))
            return chunks
        begin, self._completing = self.policy.pace.now, 0.0
        try:
            drafts = self.drafts(chunks)
        except Exception:
            logger.exception("speculation failed, and is off from now on")
            self._is_on = False
            return chunks
        if drafts:
            chunks = [
                self._with_drafts(chunk, drafts[index]) if index in drafts else chunk
                for index, chunk in enumerate(chunks)
            ]
        runs = _runs(chunks) if drafts else []
        if runs:
            self._drafted.update(chunk.sequence for chunk in runs)
            self._has_drafted = True
        num_drafts = sum(len(chunk.drafts) for chunk in runs)
        is_decodes_only = sum(chunk.length for chunk in chunks) == len(chunks) + num_drafts
        if chunks and is_decodes_only:
            self._time(chunks, num_drafts, begin)
        return chunks

    def _time(self, chunks: Chunks[Chunk], num_drafts: int, begin: float) -> None:
        """Time a step of decodes only. begin: when it was begun to decide on its drafts.

        If deciding took long and found nothing, it rests.
        """
        now, is_compared = self.policy.pace.now, self._decision == "compared"
        at = begin + self._completing if num_drafts else now
        is_ahead = _any_in_flight(chunks)
        self.policy.begin(len(chunks), num_drafts, at, is_ahead=is_ahead, is_compared=is_compared)
        if self.policy.pace.is_timing:
            self._timed = ref(chunks[0].sequence)
        if self.policy.costs is not None and not num_drafts and not is_compared:
            seconds, plain = now - begin - self._completing, self.policy.plain(len(chunks))
            is_model = self.proposer is not None and self.proposer.is_model
            self._pauses.begin(len(chunks), seconds, plain, is_model=is_model)

    def commit(
        self,
        chunks: Chunks[Chunk],
        result: StepResult,
        commit: Callable[[Chunks[Chunk], StepResult], list[Output]],
    ) -> list[Output]:
        """Commit accepted drafts as if their tokens had been a chunk of known tokens.

        commit: commits the chunks of a step without drafts.
        """
        runs = _runs(chunks) if self._has_drafted else []
        if runs:
            others = [chunk for chunk in chunks if not isinstance(chunk, DraftedChunk)]
            of_others = {chunk.sequence.id for chunk in others} & result.keys()
            outputs = commit(others, {id: result[id] for id in of_others}) if others else []
            for chunk in runs:
                outputs += self._commit_run(chunk, result.get(chunk.sequence.id), commit)
        else:
            outputs = commit(chunks, result)
        for chunk in chunks:
            if chunk.sequence.finish is not None:
                self._end(chunk.sequence)
        return outputs

    def _commit_run(
        self,
        chunk: DraftedChunk,
        sampled: ChunkResult | None,
        commit: Callable[[Chunks[Chunk], StepResult], list[Output]],
    ) -> list[Output]:
        sequence = chunk.sequence
        self._settle(chunk, sampled)
        if not isinstance(sampled, Sampled):
            return commit([kept(chunk, 1)], {} if sampled is None else {sequence.id: sampled})
        count = sequence.num_kept(sampled.token_ids)
        if sequence.finish is not None or not count:
            return []
        if count > 1:
            sequence.append(some(sampled, 0, count - 1))
        # less if the sequence was preempted while the step ran
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, chunk.start + count)
        last = some(sampled, count - 1, count)
        outputs = commit([kept(chunk, count)], {sequence.id: last})
        all_kept = some(sampled, 0, count)
        return [with_tokens(all_kept, output) for output in outputs] if count > 1 else outputs

    def drafts(self, chunks: list[Chunk]) -> dict[int, tuple[int, ...]]:
        """Return the drafts to verify, by the chunk's index, within the budget of the step.

        A subclass may draft in another way.
        """
        decodes = _decodes(chunks)
        if not decodes:
            return {}
        self._decision, found = self._found(chunks, decodes)
        self._pauses.past = 0
        self._count(self._decision, len(decodes))
        return found

    def _count(self, decision: Decision, num_decodes: int) -> None:
        self.counts.num_decodes += num_decodes
        self.counts.steps[decision] += 1

    def _end_timed(self, before: Sequence | None, chunks: Chunks[Chunk]) -> None:
        """End the time of a step, unless the engine may have been idle since.

        before: one of its sequences, None if nobody has it any more. chunks: of the next step.
        """
        self._timed = None
        if before is not None and before.finish is None:
            seconds = self.policy.pace.end(is_ahead=_any_in_flight(chunks))
            if self._decision == "tried" and seconds is not None:
                self.policy.settle(seconds + self._completing)
        else:
            self.policy.pace.drop()

    def _found(
        self, chunks: Chunks[Chunk], decodes: Chunks[tuple[int, Chunk]]
    ) -> tuple[Decision, dict[int, tuple[int, ...]]]:
        """Return what is decided, and the drafts by the chunk's index."""
        room = self._limits.max_step_tokens - sum(chunk.length for chunk in chunks)
        ahead = self._memory.states.num_ahead
        most = min(room, MAX_DRAFTS if ahead is None else ahead)
        if most <= 0:
            return "room", {}
        least = self.policy.least_worth(len(decodes), MAX_DRAFTS)
        if least > 1:
            return "cost", {}
        may_try = self.policy.may_try(1 + self._pauses.past)
        candidates = self._candidates(decodes, most, 0.0 if may_try else least)
        if isinstance(candidates, str):
            return candidates, {}
        decision: Decision = "drafted"
        values = [*candidates.values()]
        counts = self.policy.counts(len(decodes), values, most)
        if may_try and not any(counts):
            decision, counts = "tried", self.policy.trial(len(decodes), values, most)
        elif any(counts) and len(decodes) == len(chunks) and self.policy.compares(len(decodes)):
            return "compared", {}
        wanted: dict[int, Wanted] = {}
        longest = longest_rest(len(decodes))
        for (index, candidate), count in zip(candidates.items(), counts, strict=True):
            drafter = self._drafters[chunks[index].sequence]
            assert drafter is not None, "the sequence is a candidate"
            if count:
                drafts = candidate.drafts[:count]
                wanted[index] = Wanted(drafter.lookup, candidate.num_in_flight, drafts)
                drafter.rest = 0
            else:
                drafter.rest_longer(longest)
        if not wanted:
            return "unlikely", {}
        assert self.proposer is not None, "drafts are looked for"
        begin = self.policy.pace.now
        completed = self.proposer.completed([*wanted.values()])
        self._completing = self.policy.pace.now - begin
        # With cold caches, or much to read, passes take longer.
        if decision == "drafted" and not any(each.num_unread > MOST_UNREAD for each in values):
            self.policy.completed(len(decodes), self._completing)
        drafts = {index: drafts for index, drafts in zip(wanted, completed, strict=True) if drafts}
        return (decision, drafts) if drafts else ("room", {})

    def _candidates(
        self, decodes: Chunks[tuple[int, Chunk]], most: int, least: float
    ) -> dict[int, Candidate] | Decision:
        """Return the candidates by the chunk's index, at least one; or why there are none.

        least: as of `Policy.least_worth`.
        """
        candidates: dict[int, Candidate] = {}
        why: Decision = "requests"
        longest = longest_rest(len(decodes))
        for index, chunk in decodes:
            drafter = self._drafter(chunk.sequence)
            if drafter is None:
                continue
            if not drafter.rests(1 + self._pauses.past):
                candidate = self._candidate(chunk, drafter, min(most, self._num_draft_tokens))
                drafter.found_any = candidate is not None
                if candidate is not None and self._worth(candidate) >= least:
                    candidates[index] = candidate
                    continue
                drafter.history.rest()
                drafter.rest_longer(longest)
            if why != "unlikely":
                why = "unlikely" if drafter.found_any else "not_found"
        return candidates or why

    def _worth(self, candidate: Candidate) -> float:
        """Return the probability that the first draft is right."""
        worth = 1.0
        for number in range(candidate.num_in_flight + 1):
            worth *= self.policy.acceptance.expected(candidate.match + number, candidate.history)
        return worth

    def _candidate(self, chunk: Chunk, drafter: Drafter, limit: int) -> Candidate | None:
        sequence = chunk.sequence
        limit = min(limit, sequence.max_length - chunk.end - 1)
        if limit <= 0:
            return None
        # The first proposed token stands for one in flight. If it is another, the drafts are wrong.
        num_in_flight = chunk.end - len(sequence.token_ids)
        tokens, match, num_unread = drafter.lookup.propose(num_in_flight + limit)
        if len(tokens) <= num_in_flight:
            return None
        drafter.match = match + num_in_flight
        return Candidate(
            tokens[num_in_flight:],
            match,
            num_in_flight,
            drafter.history,
            chunk.end,
            sequence.params.is_greedy,
            num_unread,
            min(sequence.max_length - chunk.end, self.policy.mean_length),
        )

    def _drafter(self, sequence: Sequence) -> Drafter | None:
        try:
            return self._drafters[sequence]
        except KeyError:
            drafter = None
            if self.proposer is not None and is_verifiable(sequence.params, sequence.parts):
                drafter = Drafter(self.proposer.begin(sequence))
            self._drafters[sequence] = drafter
            return drafter

    def _with_drafts(self, chunk: Chunk, drafts: tuple[int, ...]) -> Chunk:
        """Return the chunk with drafts, or as it is if they find no free blocks."""
        id, end = chunk.sequence.id, chunk.end + len(drafts)
        groups = self._memory.layout.groups
        has_slots = all(
            group.blocks_for(end) <= len(table.blocks)
            for group, table in zip(groups, chunk.tables, strict=True)
        )
        if not has_slots:
            if not self._memory.reserve([Span(id, chunk.start, end)]):
                return chunk
            chunk = replace(chunk, tables=self._memory.tables(id))
        state = self._memory.states.with_ahead(id, chunk.state, len(drafts))
        return drafted(chunk, drafts, state=state)

    def _settle(self, chunk: DraftedChunk, sampled: ChunkResult | None) -> None:
        """Count the accepted drafts of a step that is done."""
        sequence = chunk.sequence
        num_accepted = len(sampled.token_ids) - 1 if isinstance(sampled, Sampled) else 0
        self._memory.states.settle(sequence.id, num_accepted)
        drafter = self._drafters.get(sequence)
        if not isinstance(sampled, Sampled) or drafter is None:
            return
        was_rejected = num_accepted < len(chunk.drafts)
        history, match = drafter.history, drafter.match
        self.policy.learn(history, match, num_accepted, was_rejected=was_rejected)
        self.counts.num_drafts += 1
        self.counts.num_draft_tokens += len(chunk.drafts)
        for position in range(num_accepted):
            self.counts.accepted[position] += 1

    def _end(self, sequence: Sequence) -> None:
        drafter = self._drafters.pop(sequence, None)
        if drafter is not None:
            drafter.lookup.end()
            self.policy.ended(sequence.num_generated_tokens)


def _decodes(chunks: Chunks[Chunk]) -> list[tuple[int, Chunk]]:
    """Return the chunks that decode, with their indices."""
    return [
        (index, chunk)
        for index, chunk in enumerate(chunks)
        if chunk.length == 1 and chunk.samples_token
    ]


def _runs(chunks: Iterable[Chunk]) -> list[DraftedChunk]:
    return [chunk for chunk in chunks if isinstance(chunk, DraftedChunk)]


def _any_in_flight(chunks: Chunks[Chunk]) -> bool:
    """Whether a step with chunks is scheduled while another one runs."""
    return any(chunk.sequence.num_in_flight for chunk in chunks)
