"""Property test of paged memory: any order of calls, against a naive model."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.configuration.kv_layout import KVLayout
from core.plan import Chunk
from core.sampling import SamplingParams
from core.sequence import Sequence
from strategies.memory.base import Span
from strategies.memory.blocks import PagedMemory

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 9, 7, 3


class PagedMemoryMachine(RuleBasedStateMachine):
    """The naive model holds each sequence's tokens, and blocks as lists of prefixes.

    A slot holds the tuple of all tokens up to its own, as K/V depend on all of them.
    """

    def __init__(self):
        super().__init__()
        self.memory = PagedMemory(
            NUM_BLOCKS, KVLayout.uniform(BLOCK_SIZE), num_host_blocks=NUM_HOST_BLOCKS
        )
        self.device = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.host = [[None] * BLOCK_SIZE for _ in range(NUM_HOST_BLOCKS)]
        self.sequences = {}
        self.host_tables = {}
        self.next_id = 0
        self.salt = Sequence(0, [], SamplingParams()).prefix_salt

    def _new(self, token_ids):
        sequence = Sequence(self.next_id, token_ids, SamplingParams(max_tokens=99))
        self.sequences[self.next_id] = sequence
        self.next_id += 1
        return sequence

    def _pick(self, data, *, swapped=False):
        here = [s for s in self.sequences.values() if self.memory.is_swapped(s.id) == swapped]
        return data.draw(st.sampled_from(here)) if here else None

    @precondition(lambda self: len(self.sequences) < 5)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def begin(self, tokens):
        sequence = self._new(tokens)
        hit = self.memory.adopt(sequence)
        assert hit < len(tokens)
        assert hit % BLOCK_SIZE == 0
        sequence.num_computed_tokens = hit

    @rule(data=st.data())
    def fork(self, data):
        parent = self._pick(data)
        if parent is not None and parent.num_computed_tokens > 0 and len(self.sequences) < 5:
            count = data.draw(st.integers(1, parent.num_computed_tokens))
            child = self._new(parent.token_ids[: count + 1])
            self.memory.fork(parent.id, child.id, count)
            child.num_computed_tokens = count
            if child.num_pending_tokens == 0:
                child.token_ids.append(0)
            if data.draw(st.booleans()):
                self._compute([child, parent], commit=data.draw(st.booleans()))

    @rule(data=st.data(), token=st.integers(0, 1), commit=st.booleans())
    def append(self, data, token, commit):
        sequence = self._pick(data)
        if sequence is not None:
            sequence.token_ids.append(token)
            self._compute([sequence], commit=commit)

    def _compute(self, sequences, *, commit):
        """Compute all pending tokens, or nothing if the memory is full."""
        sequences = [sequence for sequence in sequences if sequence.num_pending_tokens > 0]
        spans = [Span(s.id, s.num_computed_tokens, s.num_tokens) for s in sequences]
        before = [self.memory.held(sequence.id) for sequence in sequences]
        free = self.memory.num_free_blocks
        if not self.memory.reserve(spans):
            assert before == [self.memory.held(sequence.id) for sequence in sequences]
            assert self.memory.num_free_blocks == free
            for sequence in sequences:
                if self.memory.held(sequence.id):
                    self._forget(sequence)
            return
        self._move()
        for sequence, (_, start, end) in zip(sequences, spans, strict=True):
            tables = self.memory.tables(sequence.id)
            for position in range(start, end):
                block = tables[0].blocks[position // BLOCK_SIZE]
                others = (s for s in self.sequences if s != sequence.id)
                assert all(block not in self.memory.held(other) for other in others)
                prefix = tuple(sequence.token_ids[: position + 1])
                self.device[block][position % BLOCK_SIZE] = prefix
            sequence.num_computed_tokens = end
            if commit:
                self.memory.commit(Chunk(sequence, start, end - start, tables, samples_token=True))

    def _move(self):
        moves = self.memory.take_moves()
        for source, target in moves.swap_outs:
            self.host[target] = list(self.device[source])
        for source, target in moves.swap_ins:
            self.device[target] = list(self.host[source])
        for source, target in moves.copies:
            self.device[target] = list(self.device[source])
        return moves

    @rule(data=st.data())
    def free(self, data):
        sequence = self._pick(data, swapped=data.draw(st.booleans()))
        if sequence is not None:
            self._forget(sequence)

    def _forget(self, sequence):
        self.memory.release(sequence.id)
        del self.sequences[sequence.id]
        self.host_tables.pop(sequence.id, None)

    @rule(data=st.data())
    def swap_out(self, data):
        ids = [sequence for sequence in self.sequences if not self.memory.is_swapped(sequence)]
        some = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
        tables = {sequence_id: self.memory.held(sequence_id) for sequence_id in some}
        blocks = {block for table in tables.values() for block in table}
        held = {block for table in self.host_tables.values() for block in table}
        fits = 0 < len(blocks) <= NUM_HOST_BLOCKS - len(held)
        assert self.memory.swap_out(sorted(some)) == fits
        homes = dict(self._move().swap_outs)
        if fits:
            for sequence_id, table in tables.items():
                if table:
                    self.host_tables[sequence_id] = tuple(homes[block] for block in table)

    @rule(data=st.data())
    def swap_in(self, data):
        ids = [sequence for sequence in self.sequences if self.memory.is_swapped(sequence)]
        some = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
        blocks = {block for sequence_id in some for block in self.host_tables[sequence_id]}
        if len(blocks) <= self.memory.num_free_blocks:
            self.memory.swap_in(sorted(some))
            self._move()
            for sequence_id in some:
                del self.host_tables[sequence_id]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for sequence in self.sequences.values():
            is_swapped = self.memory.is_swapped(sequence.id)
            table = self.host_tables[sequence.id] if is_swapped else self.memory.held(sequence.id)
            blocks = self.host if is_swapped else self.device
            for position in range(sequence.num_computed_tokens):
                content = blocks[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                assert content == tuple(sequence.token_ids[: position + 1])

    @invariant()
    def cached_prefixes_are_correct(self):
        prefixes = self.memory._prefixes
        for block, (index, digest) in prefixes._keys.items():
            assert index == 0
            tokens, chained = self.device[block][-1], prefixes.hash(self.salt.encode())
            first = len(tokens) - BLOCK_SIZE + 1
            assert self.device[block] == [tokens[: first + slot] for slot in range(BLOCK_SIZE)]
            for start in range(0, len(tokens), BLOCK_SIZE):
                content = array("q", tokens[start : start + BLOCK_SIZE]).tobytes()
                chained = prefixes.hash(chained + content)
            assert digest == chained

    @invariant()
    def no_block_is_leaked(self):
        self.memory.check_integrity()


TestPagedMemory = PagedMemoryMachine.TestCase
TestPagedMemory.settings = settings(max_examples=60, stateful_step_count=40)
