"""Random calls of `WindowedMemory` with several cache groups, on K and V that are read back.

`FakeExecutor` checks all that a step reads. Here it is also checked that a hit is the longest that
the cached blocks allow, and that a sequence holds no block that nobody will read.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from core.configuration.kv_layout import CacheGroup, KVLayout, LayerShape, plan_layout
from core.plan import Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from strategies.memory.base import Span, held_blocks
from strategies.memory.blocks import PagedMemory
from strategies.memory.prefix import PrefixCache
from strategies.memory.slots import SlotMemory
from strategies.memory.windows import WindowedMemory
from tests.strategies.fakes import Arrival, FakeExecutor, drive, strategy_of
from tests.strategies.fuzz import SEVERAL_GROUPS

STEP_TOKENS, NUM_HOST_BLOCKS, MAX_SEQUENCES, MAX_LENGTH = 13, 40, 9, 70
NUM_BLOCKS = {
    "full, window 5": 160, "window 7": 60, "full, windows 6, 11": 200, "two full, window 1": 330,
}  # fmt: skip
STEMS = [[random.Random(n).randrange(2) for _ in range(50)] for n in range(3)]


class Trial:
    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layout = KVLayout(SEVERAL_GROUPS[name], step_tokens=2 * STEP_TOKENS)
        self.memory = WindowedMemory(NUM_BLOCKS[name], self.layout, num_host_blocks=NUM_HOST_BLOCKS)
        self.executor = FakeExecutor(self.layout)
        self.sequences: dict[int, Sequence] = {}
        self.flights: deque[Chunk] = deque()
        self.next_id = 0
        self.counts: Counter[str] = Counter()

    def begin(self, tokens: list[int]) -> Sequence:
        sequence = Sequence(self.next_id, tokens, SamplingParams(max_tokens=999))
        self.next_id += 1
        self.sequences[sequence.id] = sequence
        return sequence

    def adopt(self, sequence: Sequence) -> None:
        best = self.best_hit(sequence)
        hit = self.memory.adopt(sequence)
        assert hit == best, f"a hit of {hit} tokens, {best} were possible"
        sequence.num_computed_tokens = hit
        self.counts["hit tokens"] += hit

    def best_hit(self, sequence: Sequence) -> int:
        prefixes = self.memory._prefixes
        cached = {
            tuple(self.executor._block(block)[: self.layout.groups[index].block_size])
            for block, (index, _) in prefixes._keys.items()
        }
        lengths = range(0, sequence.num_skippable_tokens + 1, prefixes.hit_tokens)
        return max(length for length in lengths if self.is_served(cached, sequence, length))

    def is_served(self, cached: set[object], sequence: Sequence, length: int) -> bool:
        for index, group in enumerate(self.layout.groups):
            size, window = group.block_size, group.window
            seen = 0 if window is None else max(0, length - window + 1)
            for start in range(seen // size * size, length, size):
                ends = range(start + 1, start + size + 1)
                tokens = sequence.token_ids
                content = (self.executor._content(index, sequence, tokens[:end]) for end in ends)
                if tuple(content) not in cached:
                    return False
        return True

    def step(self) -> None:
        here = [s for s in self.sequences.values() if not self.memory.is_swapped(s.id)]
        spans: list[Span] = []
        budget = STEP_TOKENS
        for sequence in self.rng.sample(here, min(len(here), self.rng.randint(1, 3))):
            if not self.memory.held(sequence.id) and not sequence.num_computed_tokens:
                self.adopt(sequence)
            start = sequence.num_computed_tokens
            pending = len(sequence.token_ids) - start
            length = min(pending, budget, self.rng.choice((1, 3, 13)))
            if length > 0 and len(sequence.token_ids) < MAX_LENGTH:
                budget -= length
                spans.append(Span(sequence.id, start, start + length))
        if spans:
            self.run(spans)

    def run(self, spans: list[Span]) -> None:
        memory = self.memory
        before = dict(memory._tables), memory.num_free_blocks
        if not memory.reserve(spans):
            assert before == (memory._tables, memory.num_free_blocks), "a refusal changes nothing"
            self.preempt(self.sequences[self.rng.choice(spans).sequence_id])
            return
        chunks: list[Chunk] = []
        for id, start, end in spans:
            sequence = self.sequences[id]
            samples = end == len(sequence.token_ids)
            chunks.append(Chunk(sequence, start, end - start, memory.tables(id), samples))
            sequence.num_computed_tokens = end
        self.executor.run(StepPlan(tuple(chunks), memory.take_moves()))
        for chunk in chunks:
            if chunk.samples_token:
                chunk.sequence.token_ids.append(self.rng.randrange(2))
        self.flights += chunks
        self.counts["steps"] += 1

    def commit(self) -> None:
        chunk = self.flights.popleft()
        if chunk.sequence.id not in self.sequences:
            return
        self.memory.commit(chunk)
        num_computed = chunk.sequence.num_computed_tokens
        uncommitted = max(1, num_computed - chunk.end)
        tables = self.memory.tables(chunk.sequence.id)
        for group, table in zip(self.layout.groups, tables, strict=True):
            most = group.most_blocks(num_computed, uncommitted + 1)
            assert len(table.held) <= max(most, 1), "a block that nobody reads is held"

    def preempt(self, sequence: Sequence) -> None:
        self.memory.release(sequence.id)
        sequence.num_computed_tokens = 0
        self.counts["preemptions"] += 1

    def fork(self, parent: Sequence) -> None:
        """Fork from the newest token, or from an earlier one whose windows are still held."""
        newest = parent.num_computed_tokens
        count = self.rng.choice((newest, self.rng.randint(1, newest)))
        pairs = zip(self.layout.groups, self.memory.tables(parent.id), strict=True)
        if any(table.first > group.first_block(count) for group, table in pairs):
            count = newest
        child = self.begin([*parent.token_ids[:count], self.rng.randrange(2)])
        self.memory.fork(parent.id, child.id, count)
        child.num_computed_tokens = count
        self.counts["forks"] += 1
        if self.rng.random() < 0.5 and len(parent.token_ids) > newest:
            self.run([Span(child.id, count, count + 1), Span(parent.id, newest, newest + 1)])

    def swap(self, sequence: Sequence, *, out: bool) -> None:
        if out:
            self.counts["swaps"] += self.memory.swap_out([sequence.id])
        else:
            if len(held_blocks(self.memory._swapped[sequence.id])) <= self.memory.num_free_blocks:
                self.memory.swap_in([sequence.id])
        self.executor.run(StepPlan((), self.memory.take_moves()))

    def end(self, sequence: Sequence) -> None:
        self.memory.release(sequence.id)
        del self.sequences[sequence.id]

    def operate(self) -> None:
        kind, rng = self.rng.random(), self.rng
        here = [s for s in self.sequences.values() if self.memory.held(s.id)]
        one = rng.choice(here) if here else None
        has_place = len(self.sequences) < MAX_SEQUENCES - 1
        swapped = [s for s in self.sequences.values() if self.memory.is_swapped(s.id)]
        if (kind < 0.12 and has_place) or not self.sequences:
            stem = rng.choice(STEMS)[: rng.randrange(50)]
            self.begin([*stem, *(rng.randrange(2) for _ in range(rng.randint(1, 9)))])
        elif kind < 0.50:
            self.step()
        elif kind < 0.70 or len(self.flights) > 5:
            if self.flights:
                self.commit()
        elif kind < 0.80 and one and one.num_computed_tokens and has_place:
            self.fork(one)
        elif kind < 0.82 and one:
            self.preempt(one)
        elif kind < 0.85 and one:
            self.swap(one, out=True)
        elif kind < 0.88 and swapped:
            self.swap(rng.choice(swapped), out=False)
        else:
            self.end(rng.choice([*self.sequences.values()]))

    def run_all(self, num_operations: int) -> None:
        for number in range(num_operations):
            self.operate()
            if number % 20 == 0:
                self.memory.check_integrity()
        for sequence in [*self.sequences.values()]:
            self.end(sequence)
        self.memory.check_integrity()
        assert self.memory.num_held_blocks == 0


@pytest.mark.parametrize("name", SEVERAL_GROUPS)
def test_every_step_reads_its_own_tokens_and_every_hit_is_the_longest(name):
    trial = Trial(name, seed=1)
    trial.run_all(6000)
    assert min(trial.counts.values()) > 5, trial.counts
    assert trial.counts.keys() == {"steps", "hit tokens", "preemptions", "forks", "swaps"}


MUTANTS = {
    "frees a token too early": (CacheGroup, "first_block", lambda self, position: (
        0 if self.window is None else max(0, position + 2 - self.window) // self.block_size)),
    "never frees": (CacheGroup, "first_block", lambda self, position: 0),
    "writes to cached blocks": (PagedMemory, "_forget", lambda self, block: None),
    "looks into one group only": (PrefixCache, "longest", lambda self, index, sequence, limit,
        longest=PrefixCache.longest: longest(self, index, sequence, limit) if not index else limit),
    "forks share nothing": (PagedMemory, "fork", lambda self, parent, child, count: (
        self._tables.update({child: self.tables(parent)}))),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_trial_finds_mutants(monkeypatch, name):
    owner, method, replacement = MUTANTS[name]
    monkeypatch.setattr(owner, method, replacement)
    trials = [Trial(groups, seed=0) for groups in SEVERAL_GROUPS]
    with pytest.raises((AssertionError, KeyError)):
        deque(trial.run_all(1500) for trial in trials)


def test_runs_of_windows_are_rings():
    """A window's run is no longer than the window and a step, and nothing read is overwritten."""
    rng = random.Random(0)
    groups = CacheGroup(4), CacheGroup(2, 7), CacheGroup(4, 10)
    layout = KVLayout(groups, step_tokens=6)
    memory, executor, running, num_admitted = SlotMemory(150, layout), FakeExecutor(layout), {}, 0
    for id in range(3000):
        length = rng.randint(1, 90)
        if memory.reserve([Span(id, 0, length)]):
            running[id] = Sequence(id, [rng.randrange(9) for _ in range(length)], SamplingParams())
            num_admitted += 1
            assert len(memory.held(id)) == layout.blocks_for(length) <= -(-length // 4) + 7 + 5
        for sequence in [*running.values()]:
            start, length = sequence.num_computed_tokens, len(sequence.token_ids)
            end = min(length, start + rng.randint(1, 6))
            tables = memory.tables(sequence.id)
            executor.run(StepPlan((Chunk(sequence, start, end - start, tables, False),)))
            sequence.num_computed_tokens = end
            if end == length:
                memory.release(sequence.id)
                del running[sequence.id]
        memory.check_integrity()
    assert num_admitted > 300


def requests(memory, prompts, num_new=40, chunk=32):
    """Serve prompts one after the other. Return the tokens of each that were found cached."""
    hits = []
    for id, prompt in enumerate(prompts):
        sequence = Sequence(id, [*prompt], SamplingParams(max_tokens=999))
        hits.append(memory.adopt(sequence))
        sequence.num_computed_tokens = hits[-1]
        sequence.token_ids += [random.randrange(9) for _ in range(num_new)]
        while (start := sequence.num_computed_tokens) < len(sequence.token_ids):
            end = min(start + chunk, len(sequence.token_ids))
            assert memory.reserve([Span(id, start, end)])
            tables = memory.tables(id)
            sequence.num_computed_tokens = end
            memory.commit(Chunk(sequence, start, end - start, tables, samples_token=False))
        memory.release(id)
    return hits


def random_tokens(rng, count):
    return [rng.randrange(100) for _ in range(count)]


def layout_of_window(window):
    return KVLayout((CacheGroup(4), CacheGroup(4, window)), step_tokens=64)


def test_the_third_request_with_a_system_prompt_finds_it():
    """The first one's windows are not kept, the second one shows where prompts part."""
    rng = random.Random(0)
    system = random_tokens(rng, 120)
    prompts = [system + random_tokens(rng, 30) for _ in range(5)]
    memory = WindowedMemory(300, layout_of_window(8))
    assert requests(memory, prompts) == [0, 0, 120, 120, 120]


def test_the_third_request_with_the_same_prompt_finds_it():
    memory = WindowedMemory(300, layout_of_window(8))
    prompt = random_tokens(random.Random(0), 90)
    assert requests(memory, [prompt] * 4) == [0, 0, 88, 88]


def test_the_next_turn_of_a_chat_finds_all_of_it():
    rng = random.Random(0)
    memory = WindowedMemory(300, layout_of_window(8))
    prompt = random_tokens(rng, 50)
    requests(memory, [prompt], num_new=0)
    assert requests(memory, [prompt + random_tokens(rng, 9)]) == [48]


def test_windows_that_nobody_will_find_do_not_crowd_out_prefixes():
    rng = random.Random(0)
    memory = WindowedMemory(60, layout_of_window(8))
    requests(memory, [random_tokens(rng, 100)])
    assert len(memory.kept_blocks) == 35 + 2, "the full group's blocks and one window"


def test_memory_without_full_layers_keeps_all_windows():
    rng = random.Random(0)
    memory = WindowedMemory(300, KVLayout((CacheGroup(4, 8),), step_tokens=64))
    system = random_tokens(rng, 120)
    prompts = [system + random_tokens(rng, 30) for _ in range(3)]
    assert requests(memory, prompts) == [0, 120, 120]


def test_evicted_blocks_teach_no_stop():
    rng = random.Random(0)
    memory = WindowedMemory(45, layout_of_window(8))
    system = random_tokens(rng, 80)
    others = [random_tokens(rng, 100) for _ in range(2)]
    requests(memory, [system + random_tokens(rng, 9), *others, system + random_tokens(rng, 9)])
    assert not memory._stops._wanted


def test_gpt_oss_at_32k_holds_what_its_windows_need():
    """Half of the layers read all tokens, the others the last 128."""
    shapes = [LayerShape(8, 64, 64, window) for window in (128, None)] * 12
    memory = WindowedMemory(2048 + 50, plan_layout(shapes, 16, 2, 131072, step_tokens=512))
    sequence = Sequence(0, [0] * 32768, SamplingParams(max_tokens=1))
    for start in range(0, 32768, 512):
        assert memory.reserve([Span(0, start, start + 512)])
        sequence.num_computed_tokens = start + 512
        memory.commit(Chunk(sequence, start, 512, memory.tables(0), samples_token=False))
    tables = zip(memory.layout.groups, memory.tables(0), strict=True)
    assert {group.window: len(table.held) for group, table in tables} == {128: 8, None: 2048}


@pytest.mark.parametrize("batching", ["dynamic", "continuous", "paged"])
def test_freed_windows_let_more_sequences_run_at_once(batching):
    """In the same memory: a block of one group is half a block of both."""

    arrival = Arrival(0, 8, 52, params={"ignore_eos": True})

    def mean_at_once(layout, num_blocks):
        limits = {"max_sequences": 8, "max_step_tokens": 8}
        settings = {"layout": layout, "kv_reservation": "oracle", "max_model_len": 60}
        strategy = strategy_of(batching, num_blocks=num_blocks, **limits, **settings)
        counts: list[int] = []
        drive(strategy, [arrival] * 10, lambda plan: counts.append(len(plan.chunks)))
        return sum(counts) / len(counts)

    groups = (CacheGroup(4, layers=(0,)), CacheGroup(4, 4, layers=(1,)))
    kept = mean_at_once(KVLayout.uniform(4), 60)
    assert mean_at_once(KVLayout(groups, step_tokens=16), 120) > 1.05 * kept
