"""A fake executor and a driver loop, to test strategies on a fake clock and without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from core.beams import Candidates, num_candidates
from core.configuration.kv_layout import KVLayout
from core.output import Output
from core.plan import BlockMoves, BlockTable, Chunk, StepPlan, StepResult
from core.request import Request
from core.sampling import Finish, Sampled, SamplingParams, TopLogprobs
from core.sequence import Sequence as TokenSequence
from engine.failures import Guard
from engine.scores.part import PromptScores
from strategies.base import Limits, Strategy
from strategies.beam_group import BeamSearches
from strategies.factory import StrategySettings, make_strategy
from strategies.memory.states import StateMemory

Slot = tuple[int, int, int]
"""The K and V of a token: the group, the token, and what `FakeExecutor.digest` returns."""
EOS = 0
VOCABULARY = 23


def next_token(sequence_id: int, prefix: Sequence[int]) -> int:
    """Return a token that depends only on the sequence and its whole prefix; sometimes EOS."""
    return hash((sequence_id, tuple(prefix))) % VOCABULARY


def next_candidates(sequence: TokenSequence, prefix: Sequence[int]) -> Candidates:
    """Return the likeliest tokens of a beam, which depend only on its tokens."""
    scored = sorted(
        ((hash((token, tuple(prefix))) % 1000 / -1000, token) for token in range(VOCABULARY)),
        reverse=True,
    )[: num_candidates(sequence.params, len(sequence.stop_token_ids))]
    return Candidates(tuple(t for _, t in scored), tuple(s for s, _ in scored))


class FakeExecutor:
    """Keeps K/V as (token, hash of all tokens so far) and answers from what it reads back.

    The prefix is read through the block table of each group, as far as its window reaches, so a
    wrong block shows as a wrong token. The hash stands for the dependence of K/V on the whole
    prefix.
    """

    def __init__(self, layout: KVLayout | int) -> None:
        """layout: an integer is the block size of a single group."""
        self.layout = KVLayout.uniform(layout) if isinstance(layout, int) else layout
        self._size = max(group.block_size for group in self.layout.groups)
        self.slots: dict[tuple[int, int], Slot] = {}
        self.host: dict[int, list[Slot | None]] = {}
        self.states: dict[int, int] = {}
        """By slot: what `digest` returns for the tokens that the state has passed."""
        self.host_states: dict[int, int] = {}
        self.num_steps = 0
        self._newest: dict[int, int] = {}
        """Tokens sampled by the last step, by sequence id; the strategy may not know them yet."""

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self._move(plan.moves)
        result: dict[int, Sampled | Candidates] = {}
        new_states: dict[int, int] = {}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert chunk.length > 0
            tokens = [*sequence.token_ids]
            if chunk.ends_in_flight:
                tokens.append(self._newest[sequence.id])
            assert chunk.end <= len(tokens)
            prefix = tokens[: chunk.end]
            for index, table in enumerate(chunk.tables):
                for position in range(chunk.start, chunk.end):
                    self.slots[self._slot(index, table, position)] = self._content(
                        index, sequence, prefix[: position + 1]
                    )
                self._read(index, table, chunk, prefix)
            self._advance(chunk, prefix, new_states)
            if chunk.samples_token or chunk.extra_rows:
                result[sequence.id] = self.sample(chunk, prefix)
        self.states |= new_states
        self._newest = {
            id: sampled.token_ids[0] for id, sampled in result.items() if sampled.token_ids
        }
        return result

    def digest(self, sequence: TokenSequence, prefix: Sequence[int]) -> int:
        """Return what K and V of the last token of a prefix depend on."""
        return hash(tuple(prefix))

    def sample(self, chunk: Chunk, prefix: Sequence[int]) -> Sampled | Candidates:
        """Return the result of a chunk. A score has the position as its rank."""
        sequence = chunk.sequence
        if sequence.params.beam_width:
            return next_candidates(sequence, prefix)
        token_ids = (next_token(sequence.id, prefix),) if chunk.samples_token else ()
        scores = tuple(
            TopLogprobs(-0.5, position, (sequence.token_ids[position + 1],), (-0.5,))
            for position in chunk.extra_rows
        )
        return Sampled(token_ids, (-0.5,) * len(token_ids), prompt_logprobs=scores)

    def _advance(self, chunk: Chunk, prefix: Sequence[int], new_states: dict[int, int]) -> None:
        """Advance the state of a chunk's sequence, if there are states.

        All chunks of a step run at the same time: none may write what another one reads.
        """
        if chunk.state.writes < 0:
            return
        if chunk.start:
            expected = self.digest(chunk.sequence, prefix[: chunk.start])
            assert self.states[chunk.state.reads] == expected, "the state of another prefix"
        first = chunk.end + 1 - len(chunk.state.written)
        for end, slot in enumerate(chunk.state.written, start=first):
            assert slot not in new_states, "two chunks write one state"
            new_states[slot] = self.digest(chunk.sequence, prefix[:end])
        for length, slot in chunk.state.kept:
            assert slot not in new_states or (length, slot) == (chunk.length, chunk.state.writes)
            new_states[slot] = self.digest(chunk.sequence, prefix[: chunk.start + length])

    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> FakeStep:
        return FakeStep(self.run(plan))

    def _move(self, moves: BlockMoves) -> None:
        for pairs in (moves.swap_outs, moves.swap_ins, moves.copies):
            targets = [target for _, target in pairs]
            assert len(targets) == len(set(targets)), "two moves into one block"
        assert not {s for s, _ in moves.copies} & {t for _, t in moves.copies}, (
            "a copy's source is overwritten"
        )
        for source, target in moves.state_swap_outs:
            self.host_states[target] = self.states[source]
        for source, target in moves.state_swap_ins:
            self.states[target] = self.host_states[source]
        for source, target in moves.swap_outs:
            self.host[target] = self._block(source)
        for source, target in moves.swap_ins:
            self._put(target, self.host[source])
        for source, target in moves.copies:
            self._put(target, self._block(source))

    def _block(self, block: int) -> list[Slot | None]:
        return [self.slots.get((block, offset)) for offset in range(self._size)]

    def _put(self, block: int, content: list[Slot | None]) -> None:
        for offset, slot in enumerate(content):
            self.slots.pop((block, offset), None)
            if slot is not None:
                self.slots[block, offset] = slot

    def _read(self, index: int, table: BlockTable, chunk: Chunk, prefix: list[int]) -> None:
        """Check all K and V of a group that the chunk's queries see."""
        window = self.layout.groups[index].window
        first = 0 if window is None else max(0, chunk.start + 1 - window)
        for position in range(first, chunk.end):
            found = self.slots[self._slot(index, table, position)]
            expected = self._content(index, chunk.sequence, prefix[: position + 1])
            assert found == expected, "K/V of another sequence or group"

    def _content(self, index: int, sequence: TokenSequence, prefix: list[int]) -> Slot:
        return index, prefix[-1], self.digest(sequence, prefix)

    def _slot(self, index: int, table: BlockTable, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.layout.groups[index].block_size)
        assert block >= table.first, "the block left the window"
        return table.blocks[block], offset


@dataclass(frozen=True)
class FakeStep:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass(frozen=True)
class Arrival:
    """One request of a workload. It may be aborted `abort_after` seconds after its arrival."""

    time: int
    num_prompt_tokens: int
    max_tokens: int
    abort_after: int | None = None
    abort_in_step: bool = False
    """Abort after a step has run and before that step is committed, not between two steps."""
    abort_index: int | None = None
    """Index of the answer to abort; None: the whole request."""
    prompt_seed: int | None = None
    """Prompts with the same seed share a prefix; prompts without a seed do not."""
    params: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further fields of the request's SamplingParams."""


@dataclass
class Record:
    """The outputs of each answer as clients saw them, and what the strategy did.

    The id of an answer is the request's id plus the answer's index. It is also the id of its
    sequence unless only the best answers are returned.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    finish: dict[int, Finish] = field(default_factory=dict[int, Finish])
    aborted: set[int] = field(default_factory=set[int])
    """Ids of aborted answers."""
    most_at_once: int = 0

    def take(self, output: Output) -> None:
        id = output.request_id + output.index
        assert id not in self.aborted, "output after an abort"
        assert id not in self.finish, "a second terminal output"
        self.tokens.setdefault(id, []).extend(output.token_ids)
        if output.finish is not None:
            self.finish[id] = output.finish


def strategy_of(batching: str, *, num_blocks: int = 64, **changes: object) -> Strategy:
    """Return a strategy with small limits. changes: fields of StrategySettings or Limits."""
    limits = {"max_sequences": 4, "max_step_tokens": 16}
    limits |= {name: changes.pop(name) for name in tuple(changes) if name in limits}
    settings = {
        "batching": batching,
        "num_blocks": num_blocks,
        "layout": KVLayout.uniform(4),
        "max_model_len": 48,
        "max_delay_s": 3.0,
        "kv_reservation": "max",
        "enable_prefix_caching": True,
        "preemption_mode": "recompute",
        "num_swap_blocks": 0,
        "limits": Limits(**limits),
    }
    return make_strategy(StrategySettings(**(settings | changes)))


def request_of(arrival: Arrival, id: int) -> Request:
    # Integers only: the hash of a string differs from process to process.
    own = -1 - arrival.prompt_seed if arrival.prompt_seed is not None else id
    prompt = [
        1 + hash((own, position)) % (VOCABULARY - 1)
        for position in range(arrival.num_prompt_tokens)
    ]
    params = SamplingParams(max_tokens=arrival.max_tokens, **arrival.params)
    made = (feature.part(params, len(prompt)) for feature in (PromptScores(), BeamSearches()))
    parts = tuple(part for part in made if part is not None)
    return Request(id, prompt, params, arrival=arrival.time, eos_token_ids=[EOS], parts=parts)


def requests_of(arrivals: Sequence[Arrival]) -> list[Request]:
    """Number requests as the engine does, which leaves an id for each sequence of a request."""
    requests: list[Request] = []
    for arrival in arrivals:
        last = requests[-1] if requests else None
        id = last.id + len(last.sequence_ids) if last is not None else 0
        requests.append(request_of(arrival, id))
    return requests


def drive(
    strategy: Strategy,
    arrivals: Sequence[Arrival],
    after_step: Callable[[StepPlan | None], None] = lambda plan: None,
    *,
    overlaps: bool = False,
) -> Record:
    """Run a workload to its end, checking every step. A step takes one second of a fake clock.

    overlaps: each step is scheduled and run before the previous step is committed.
    """
    executor, record, now = FakeExecutor(strategy.memory.layout), Record(), 0
    requests = list(zip(requests_of(arrivals), arrivals, strict=True))
    todo = sorted(requests, key=lambda item: item[1].time)
    in_flight: tuple[StepPlan, StepResult] | None = None
    while todo or strategy.has_work() or in_flight:
        while todo and todo[0][1].time <= now:
            request, _ = todo.pop(0)
            if not strategy.add(request):
                record.aborted |= answers_of(request)
        _abort(strategy, requests, record, now, in_step=False)
        plan = strategy.schedule(now)
        submitted = None
        if plan is not None:
            check_plan(strategy, plan)
            record.most_at_once = max(record.most_at_once, len(plan.chunks))
            submitted = plan, executor.run(plan)
        _abort(strategy, requests, record, now, in_step=True)
        if overlaps:
            submitted, in_flight = in_flight, submitted
        if submitted is not None:
            for output in strategy.commit(*submitted):
                record.take(output)
        strategy.memory.check_integrity()
        after_step(plan)
        now += 1
        assert now < 3_000, "no progress"
    assert strategy.memory.num_held_blocks == 0, "blocks leaked"
    assert not strategy._group_of, "a finished group is still known"
    for request, _ in requests:
        assert answers_of(request) <= record.finish.keys() | record.aborted
    return record


def fail(strategy: Strategy, plan: StepPlan) -> list[Output]:
    """Fail a plan as the engine does, for the reason "why"."""
    guard = Guard(strategy)
    guard.fail(plan, "why")
    return guard.take_outputs()


def answers_of(request: Request) -> set[int]:
    return set(range(request.id, request.id + request.params.n))


def check_plan(strategy: Strategy, plan: StepPlan) -> None:
    assert plan.chunks or plan.moves
    assert plan.num_tokens <= strategy.limits.max_step_tokens, "over the token budget"
    widest = max((group.num_sequences for group in strategy.running), default=0)
    assert len(plan.chunks) <= max(strategy.limits.max_sequences, widest)
    ids = [chunk.sequence.id for chunk in plan.chunks]
    assert len(ids) == len(set(ids)), "two chunks of one sequence"
    read = {b: chunk for chunk in plan.chunks for table in chunk.tables for b in table.held}
    for chunk in plan.chunks:
        for group, table in zip(strategy.memory.layout.groups, chunk.tables, strict=True):
            for position in range(chunk.start, chunk.end):
                block = table.blocks[position // group.block_size]
                assert read[block] is chunk, "a written block is in another sequence's table"
            others = {other.state.reads for other in plan.chunks if other is not chunk}
            written = {*chunk.state.written, *(slot for _, slot in chunk.state.kept)} - {-1}
            assert not written & others, "a written state is read by another chunk"
            if isinstance(strategy.memory, StateMemory):
                checkpoints = strategy.memory.states.slots.checkpoints
                assert not any(slot in checkpoints for slot in written), "a checkpoint is written"


def _abort(
    strategy: Strategy,
    requests: Sequence[tuple[Request, Arrival]],
    record: Record,
    now: int,
    *,
    in_step: bool,
) -> None:
    for request, arrival in requests:
        due = arrival.abort_after is not None and now >= arrival.time + arrival.abort_after
        index = arrival.abort_index
        if due and arrival.abort_in_step == in_step and strategy.abort(request.id, index):
            record.aborted |= answers_of(request) if index is None else {request.id + index}
