"""Drafts of a smaller model, which samples with a request's own parameters, seed and positions.

So its tokens are right as often as both models, given the same random number, choose the same
token. It has K and V of its own, and reads what it lacks of a sequence when it has to propose.

```
tokens of the model        | a b c d |      c and d are new: c was proposed, d was sampled
tokens of the draft model  | a b c x |      x was rejected, so only d is to be read
first pass                       d ▶ e      reads all tokens that were not read, or are others now
further passes                   e ▶ f      one draft each
```

A pass serves all sequences that are to have further drafts.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary, finalize

import msgspec

from core.configuration.kv_layout import KVLayout
from core.plan import Chunk, StepPlan, StepResult
from core.sampling import Sampled
from core.sequence import Sequence
from engine.executor import Executor
from strategies.memory.base import Span
from strategies.memory.blocks import PagedMemory
from strategies.speculation.proposer import NO_PROPOSAL, Lookup, Proposal, Proposer, Wanted

OPEN = -1
"""Stands for a token that is not sampled yet."""
MATCH = 1_000
"""A model's tokens count as those after the longest matches, until some were verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    executor: Executor
    """Runs the passes. It has `num_blocks` blocks that nobody else uses."""
    layout: KVLayout
    num_blocks: int
    max_step_tokens: int
    longest: int
    """The most tokens of a sequence that can be read."""
    description: str
    """For a note."""


class DraftModel(Proposer):
    is_model: ClassVar[bool] = True
    caches_prefixes: ClassVar[bool] = True

    def __init__(self, settings: DraftSettings) -> None:
        self.executor = settings.executor
        self.memory = PagedMemory(
            settings.num_blocks, settings.layout, caches_prefixes=self.caches_prefixes
        )
        self.longest = settings.longest
        self.description = settings.description
        self._max_step_tokens = settings.max_step_tokens
        self._lookups: WeakValueDictionary[int, DraftLookup] = WeakValueDictionary()
        """By sequence id."""

    def begin(self, sequence: Sequence) -> DraftLookup:
        lookup = self._make_lookup(sequence)
        self._lookups[sequence.id] = lookup
        # Sequences that are aborted end without a call.
        finalize(lookup, self._free, sequence.id).atexit = False
        return lookup

    def _make_lookup(self, sequence: Sequence) -> DraftLookup:
        return DraftLookup(sequence, self.longest)

    def completed(self, wanted: Items[Wanted]) -> list[tuple[int, ...]]:
        """Sample the drafts: none for a sequence of which too much is still to be read."""
        lookups = [one.lookup for one in wanted if isinstance(one.lookup, DraftLookup)]
        firsts = [
            lookup.catch_up() + one.num_in_flight
            for lookup, one in zip(lookups, wanted, strict=True)
        ]
        ends = {
            lookup: first + len(one.drafts)
            for lookup, first, one in zip(lookups, firsts, wanted, strict=True)
        }
        chunks = self._first_chunks(ends)
        while chunks:
            plan = StepPlan(tuple(chunks), self.memory.take_moves())
            result = self.executor.submit(plan, lambda: None).wait()
            ready = [lookup for chunk in chunks if (lookup := self._take(chunk, result))]
            chunks = [
                self._chunk(lookup, 1)
                for lookup in ready
                if len(lookup.sequence.token_ids) < ends[lookup]
            ]
        return [
            tuple(lookup.sequence.token_ids[first:])
            for lookup, first in zip(lookups, firsts, strict=True)
        ]

    def _first_chunks(self, ends: Mapping[DraftLookup, int]) -> list[Chunk]:
        """Return chunks of the tokens to read, within the budget of a step.

        ends: how many tokens each sequence is to have at last.
        """
        chunks: list[Chunk] = []
        left = self._max_step_tokens
        for lookup, end in ends.items():
            sequence = lookup.sequence
            if not lookup.num_read and not self.memory.tables(sequence.id)[0].blocks:
                lookup.num_read = self.memory.adopt(sequence)
            length = min(len(sequence.token_ids) - lookup.num_read, left)
            if length <= 0 or not self._can_read(lookup):
                continue
            if self._reserve(lookup, end - 1, ends):
                chunks.append(self._chunk(lookup, length))
                left -= length
        return chunks

    def _can_read(self, lookup: DraftLookup) -> bool:
        """Whether all that it reads of the sequence's next tokens is there."""
        return True

    def _reserve(self, lookup: DraftLookup, end: int, wanted: Container[DraftLookup]) -> bool:
        """Reserve blocks. Sequences of which no drafts are wanted give theirs back if they must."""
        spans = [Span(lookup.sequence.id, lookup.num_read, end)]
        if self.memory.reserve(spans):
            return True
        for other in [*self._lookups.values()]:
            if other not in wanted:
                self._forget(other)
        return self.memory.reserve(spans)

    def _forget(self, lookup: DraftLookup) -> None:
        """Free what is kept of a sequence, which is read anew if drafts are wanted again."""
        self._free(lookup.sequence.id)
        lookup.num_read = 0

    def _free(self, sequence_id: int) -> None:
        self.memory.release(sequence_id)

    def _chunk(self, lookup: DraftLookup, length: int) -> Chunk:
        sequence, start = lookup.sequence, lookup.num_read
        samples = start + length == len(sequence.token_ids)
        return Chunk(sequence, start, length, self.memory.tables(sequence.id), samples)

    def _take(self, chunk: Chunk, result: StepResult) -> DraftLookup | None:
        """Note that a chunk was read, and append its token. Return the lookup if it has one."""
        lookup = self._lookups[chunk.sequence.id]
        lookup.num_read = chunk.end
        if chunk.end <= lookup.num_known:
            self.memory.commit(chunk)  # later sequences may begin with the same tokens
        sampled = result.get(chunk.sequence.id)
        if not chunk.samples_token or not isinstance(sampled, Sampled):
            return None
        chunk.sequence.token_ids += sampled.token_ids
        return lookup


class DraftLookup(Lookup):
    num_skipped: ClassVar[int] = 0
    """How many of the sequence's first tokens the model does not read."""

    def __init__(self, sequence: Sequence, longest: int) -> None:
        self._known = sequence.token_ids
        self._longest = longest
        self.sequence = sequence.fork(sequence.id)
        """Has the known tokens as well, without those that are skipped, and drafts after them."""
        del self.sequence.token_ids[: self.num_skipped]
        self.sequence.parts = ()
        self.sequence.num_in_flight = 0
        self.sequence.params = msgspec.structs.replace(sequence.params, logprobs=None)
        self.num_known = 0
        self.num_read = 0
        """How many of the first tokens have K and V."""

    def propose(self, count: int) -> Proposal:
        """Return open tokens, which `DraftModel.completed` samples."""
        count = min(count, self._longest - len(self._known))
        if count <= 0 or len(self._known) <= self.num_skipped:
            return NO_PROPOSAL
        num_unread = len(self._known) - self.num_skipped - self.num_read - 1
        return Proposal((OPEN,) * count, MATCH, max(0, num_unread))

    def end(self) -> None:
        """Do nothing: the blocks are freed with this object."""

    def catch_up(self) -> int:
        """Take the known tokens in place of drafts that were wrong. Return their number."""
        known, tokens, skipped = self._known, self.sequence.token_ids, self.num_skipped
        num_known = len(known) - skipped
        same, both = self.num_known, min(num_known, len(tokens))
        while same < both and known[skipped + same] == tokens[same]:
            same += 1
        # The newest token is always read, to sample what follows.
        self.num_read = min(self.num_read, same, num_known - 1)
        tokens[same:] = known[skipped + same :]
        self.num_known = num_known
        return num_known
