"""Turns what an engine does into the frames of a recording."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from math import gcd
from operator import add

import msgspec

from core.output import Output
from core.part import Part
from core.plan import StepPlan, StepResult
from core.protocol.stats import Receipt
from core.request import Request
from core.sampling import Finish, SequenceFailure
from core.sequence import Sequence as TokenSequence
from engine.executor import FailedAt, Observer
from engine.observers.frames import (
    DIGEST_BYTES,
    Aborted,
    Answered,
    AnyFrame,
    Arrived,
    Done,
    Scheduled,
    Searched,
    Waited,
)
from engine.stopwatch import Stopwatch
from strategies.base import Strategy
from strategies.group import SequenceGroup

STOPPED = (Finish.EOS, Finish.STOP)


class Recorder(Observer):
    """Hands the frames of each step to `write` when the step ends.

    Sequences that the step before had too, each with as many tokens, cost a few comparisons of
    lists.
    """

    def __init__(
        self,
        strategy: Strategy,
        write: Callable[[list[AnyFrame]], None],
        *,
        model_time: Stopwatch | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._strategy = strategy
        self._write = write
        self._model_time = model_time or Stopwatch()
        self._clock_ns = clock_ns
        self._digest = partial(blake2b, key=secrets.token_bytes(32), digest_size=DIGEST_BYTES)
        self._link = link_tokens(strategy)
        self._frames: list[AnyFrame] = []
        self._num_steps = 0
        self._uncommitted: deque[int] = deque()
        """The numbers of the steps that are neither committed nor failed."""
        self._committed: tuple[int, StepPlan, StepResult] | None = None
        self._searches: list[SequenceGroup] = []
        """The groups of searches that the committed step continues."""
        self._num_searches = 0
        """Requests so far that search."""
        self._begun = (0.0, 0, 0.0)
        """When the step began: `now`, the clock, and the model's seconds."""
        self._ids: list[int] = []
        """The rows of the last step; the next one where their chunks end."""
        self._ends: list[int] = []
        self._lengths: list[int] = []

    def added(self, request: Request) -> None:
        sequence, params = request.sequences[0], request.params
        num_links = sequence.num_prompt_tokens // self._link
        num_sequences, num_ids = len(request.sequences), len(request.sequence_ids)
        width = num_ids if num_ids > num_sequences else 0
        self._num_searches += width > 0
        self._frames.append(
            Arrived(
                request.arrival,
                request.id,
                sequence.num_prompt_tokens,
                params.max_tokens,
                b"".join(self._link_digest(sequence, i * self._link) for i in range(num_links)),
                self._digest(sequence.prefix_salt.encode()).digest(),
                params.num_samples,
                params.num_answers,
                width,
                params.priority,
                bool(sequence.extra_rows(0, sequence.num_prompt_tokens)),
                sequence.needs_newest_token,
                tuple(_uncut(sequence)),
            )
        )

    def aborted(self, request_id: int, index: int | None, reason: str) -> Receipt | None:
        self._frames.append(Aborted(self._clock_ns(), request_id, index, reason))

    def begins(self, now: float) -> None:
        self._begun = now, self._clock_ns(), self._model_time.seconds

    def scheduled(self, plan: StepPlan | None) -> None:
        strategy, now = self._strategy, self._begun[0]
        if plan is None:
            if strategy.has_work() or self._uncommitted:
                self._frames.append(Waited(now))
            return
        chunks, moves = plan.chunks, plan.moves
        ids = [chunk.sequence.id for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        lengths = [chunk.length for chunk in chunks]
        continues = ids == self._ids and starts == self._ends and lengths == self._lengths
        self._ids, self._lengths = ids, lengths
        self._ends = list(map(add, starts, lengths))
        self._uncommitted.append(self._num_steps)
        self._num_steps += 1
        self._frames.append(
            Scheduled(
                now,
                None if continues else ids,
                None if continues else starts,
                None if continues else lengths,
                strategy.num_running,
                len(strategy.waiting),
                strategy.memory.num_free_blocks,
                strategy.num_preemptions,
                moves.swap_outs,
                moves.swap_ins,
                moves.copies,
                moves.state_swap_outs,
                moves.state_swap_ins,
            )
        )

    def failed(self, plan: StepPlan, where: FailedAt) -> None:
        # A step that could not be submitted is the newest, one that was lost the oldest.
        is_lost = where == "wait"
        number = self._uncommitted.popleft() if is_lost else self._uncommitted.pop()
        newer = self._num_steps - 1 - number
        self._frames.append(Done(newer, self._wall_ns(), self._model_ns(), where))

    def computed(self, plan: StepPlan, result: StepResult) -> None:
        self._committed = self._uncommitted.popleft(), plan, result
        if self._num_searches:
            groups = self._strategy.by_group(plan).items()
            self._searches = [
                group
                for group, chunks in groups
                if group.is_indivisible and chunks[0].samples_token
            ]

    def ends(self, outputs: Sequence[Output]) -> Sequence[Output]:
        # Most outputs have one token and end nothing; finding the others is all that they cost.
        others = [
            output for output in outputs if output.finish is not None or len(output.token_ids) > 1
        ]
        errors = [output.request_id for output in others if output.finish is Finish.ERROR]
        if self._committed is not None:
            self._frames.append(self._done(*self._committed, others, errors))
            self._committed = None
        elif errors and self._frames and isinstance(last := self._frames[-1], Done):
            self._frames[-1] = msgspec.structs.replace(last, errors=errors)
        if self._frames:
            self._write(self._frames)
            self._frames = []
        return outputs

    def _done(
        self,
        number: int,
        plan: StepPlan,
        result: StepResult,
        outputs: Sequence[Output],
        errors: list[int],
    ) -> Done:
        """outputs: those that end, or have not one token."""
        searches, self._searches = self._searches, []
        searched = {id for group in searches for id in group.sequence_ids}
        answered = [
            Answered(id, len(output.token_ids), output.finish in STOPPED)
            for output in outputs
            if (id := output.request_id + output.index) not in searched
        ]
        several = {row.id: row.num_tokens for row in answered if row.num_tokens > 1}
        filled = self._filled(plan, several, searched)
        return Done(
            self._num_steps - 1 - number,
            self._wall_ns(),
            self._model_ns(),
            None,
            [row for row in answered if row.is_last or row.num_tokens > 1],
            [sequence.id for sequence, _ in filled],
            [end for _, end in filled],
            b"".join(self._link_digest(sequence, end - self._link) for sequence, end in filled),
            [self._searched(group) for group in searches if group.request.id not in errors],
            _not_sampled(result) if errors else [],
            errors,
        )

    def _filled(
        self, plan: StepPlan, several: dict[int, int], searched: set[int]
    ) -> list[tuple[TokenSequence, int]]:
        """Return where the tokens that a step sampled fill a link.

        several: how many, if more than one, by sequence id. searched: sequences to leave out.
        """
        link = self._link
        filled = [
            (chunk.sequence, len(chunk.sequence.token_ids))
            for chunk in plan.chunks
            if len(chunk.sequence.token_ids) % link == 0 and chunk.samples_token
        ]
        for chunk in plan.chunks if several else ():
            sequence = chunk.sequence
            if sequence.id in several:
                stop = len(sequence.token_ids)
                first = stop - several[sequence.id] + 1
                filled += ((sequence, end) for end in range(first + -first % link, stop, link))
        return [(sequence, end) for sequence, end in filled if sequence.id not in searched]

    def _searched(self, group: SequenceGroup) -> Searched:
        if not group.sequences:
            return Searched(group.request.id, [])
        parents = group.parents
        start = len(group.sequences[0].token_ids) - self._link
        if start % self._link:
            return Searched(group.request.id, parents)
        digests = (self._link_digest(sequence, start) for sequence in group.sequences)
        return Searched(group.request.id, parents, b"".join(digests))

    def _link_digest(self, sequence: TokenSequence, start: int) -> bytes:
        return self._digest(sequence.content(start, start + self._link)).digest()

    def _wall_ns(self) -> int:
        return self._clock_ns() - self._begun[1]

    def _model_ns(self) -> int:
        return round((self._model_time.seconds - self._begun[2]) * 1e9)


def link_tokens(strategy: Strategy) -> int:
    """Return the tokens of a link: the most that every block has a multiple of."""
    return gcd(*(group.block_size for group in strategy.memory.layout.groups))


def _not_sampled(result: StepResult) -> list[int]:
    return [id for id, found in result.items() if isinstance(found, SequenceFailure)]


def _uncut(sequence: TokenSequence) -> Iterator[tuple[int, int]]:
    """Yield the spans of the prompt that no chunk may cut."""
    if all(type(part).chunk_end is Part.chunk_end for part in sequence.parts):
        return
    ends = range(sequence.num_prompt_tokens + 1)
    free = [end for end in ends if sequence.chunk_end(end) == end]
    yield from (pair for pair in pairwise(free) if pair[1] - pair[0] > 1)
