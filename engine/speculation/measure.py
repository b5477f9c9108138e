"""Measures at start what steps cost by their rows, with and without drafts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from core.configuration.kv_layout import CacheGroup
from core.plan import BlockTable, Chunk, StateSlots, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence as TokenSequence
from engine.executor import Executor
from strategies.base import Limits
from strategies.speculation.costs import StepCosts, curve
from strategies.speculation.drafts import drafted

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16, 20, 24, 25, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows to measure, around full tiles of 6 and 12 rows."""
FIRST = (1, 12, 48, 192, 4, 24, 96, 256)
"""Those that are measured first, so that little time still gives a curve of all numbers. Rows
beyond the last of them are calculated, and so dear that none would be chosen."""
CONTEXT = 256
"""Tokens in the contexts of measured steps, if sequences may be so long."""
LONG = 4
"""How many times longer the contexts are from which the cost of a longer one is measured."""
MANY = 16
"""The sequences of a step of which only one has a draft."""
SEVERAL = 4
"""The sequences of a draft model's pass."""
NUM_TIMES = 4
"""The shortest of so many times counts: the others were disturbed."""
MOST_SECONDS = 6.0
"""The time to measure in. Steps of more rows are calculated from those that were measured."""
NOISE = 0.05
"""The least part of a step that counts as hidden by the next one."""
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.7, top_p=0.9, seed=0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of step."""

    num_rows: int
    context: int
    """Tokens before and in each row's sequence."""
    has_drafts: bool
    is_drawn: bool = False
    """Whether its tokens are drawn; else they are the most likely ones."""
    is_mixed: bool = False
    """Whether only one of its sequences has a draft, and only one; `has_drafts` is false."""
    is_read: bool = False
    """Whether its only sequence is read from its first token on: `context` tokens."""
    is_twice: bool = False
    """Whether a second one like it is submitted before the first is waited for."""


class StepTimer:
    def __init__(
        self,
        executor: Executor,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        vocab_size: int,
        num_drafts: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """executor: nobody else uses it, or its K and V, yet."""
        self._executor = executor
        self._clock = clock
        self._groups = groups
        self._num_blocks = num_blocks
        self._num_drafts = num_drafts
        self._tokens = random.Random(0).choices(range(vocab_size), k=LONG * CONTEXT)

    def seconds(self, needed: Sequence[Kind], others: Sequence[Kind]) -> dict[Kind, float]:
        """Return the shortest time of each kind of step; of `others`, as many as time allows.

        All are timed in turns, so that what disturbs them for a while disturbs all of them.
        """
        begin = self._clock()
        found = {kind: self._time(kind) for kind in needed}
        for kind in others:
            found[kind] = self._time(kind)
            # Half of the time, since some first steps take 50 times as long as the second.
            if self._clock() > begin + MOST_SECONDS / 2:
                break
        for turn in range(NUM_TIMES):
            for kind in found:
                if turn and self._clock() > begin + MOST_SECONDS:
                    return found
                seconds = self._time(kind)
                # The first step of a kind may be slow: it does not count.
                found[kind] = min(found[kind], seconds) if turn else seconds
        return found

    def _time(self, kind: Kind) -> float:
        plans = [StepPlan(tuple(self._chunks(kind))) for _ in range(1 + kind.is_twice)]
        begin = self._clock()
        for step in [self._executor.submit(plan, lambda: None) for plan in plans]:
            step.wait()
        return self._clock() - begin

    def _chunks(self, kind: Kind) -> Iterator[Chunk]:
        width = 1 + self._num_drafts if kind.has_drafts else 1
        for number, first in enumerate(range(0, kind.num_rows, width)):
            tokens = [*self._tokens[: kind.context]]
            sequence = TokenSequence(number, tokens, DRAWN if kind.is_drawn else GREEDY)
            end = kind.context + max(width, 2)
            tables = tuple(self._table(group, number, end) for group in self._groups)
            drafts = self._tokens[: min(width, kind.num_rows - first) - 1]
            ahead = tuple(range(first + 1, first + 1 + len(drafts)))
            if kind.is_mixed and not number:
                drafts, ahead = self._tokens[:1], (kind.num_rows,)
            # Each row has a slot of its own, if the model keeps states.
            state = StateSlots(first, first, ahead)
            start = 0 if kind.is_read else kind.context - 1
            length = kind.context - start
            chunk = Chunk(sequence, start, length, tables, samples_token=True, state=state)
            yield drafted(chunk, tuple(drafts), state=state) if drafts else chunk

    def _table(self, group: CacheGroup, number: int, num_tokens: int) -> BlockTable:
        """Return a table of blocks that other sequences may have too, since nobody reads them."""
        length = group.blocks_for(num_tokens)
        return BlockTable(tuple((number * length + i) % self._num_blocks for i in range(length)))


def measure_costs(
    timer: StepTimer,
    limits: Limits,
    num_drafts: int,
    max_model_len: int,
    num_ahead: int,
    *,
    overlaps: bool = False,
) -> StepCosts:
    """Measure steps in at most some MOST_SECONDS.

    num_drafts: the most of a sequence. num_ahead: the most in a step, and not fewer. overlaps:
    whether steps without drafts will overlap.
    """
    context = max(1, min(CONTEXT, max_model_len - num_drafts - 1))
    longer = max(context, min(LONG * CONTEXT, max_model_len - num_drafts - 1))
    num_drafting = min(limits.max_sequences, num_ahead // num_drafts)
    most = min(limits.max_step_tokens, num_drafting * (1 + num_drafts))
    kinds = {
        has_drafts: [Kind(rows, context, has_drafts) for rows in ROWS if rows <= limit]
        for has_drafts, limit in ((False, limits.max_sequences), (True, most))
    }
    rows, few = min(most, 1 + num_drafts), min(most, 2)
    long = Kind(rows, longer, has_drafts=True)
    drawn = [
        Kind(1, context, has_drafts=False, is_drawn=True),
        Kind(few, context, has_drafts=True, is_drawn=True),
        Kind(rows, context, has_drafts=True, is_drawn=True),
    ]
    likeliest = [replace(kind, is_drawn=False) for kind in drawn]
    order = [*FIRST, *(rows for rows in ROWS if rows not in FIRST)]
    by_rows = sorted((*kinds[False], *kinds[True]), key=lambda kind: order.index(kind.num_rows))
    many = max(1, min(MANY, limits.max_sequences - 1, most - 1))
    decodes = Kind(many + 1, context, has_drafts=False)
    mixed = Kind(many, context, has_drafts=False, is_mixed=True)
    one, full = likeliest[0], kinds[False][-1]
    needed = [long, *drawn, *likeliest, decodes, mixed, one]
    if overlaps:
        needed.append(_twice(one))
        by_rows.append(_twice(full))
    seconds = timer.seconds(needed, by_rows)
    plain, draft, drafts = (
        max(0.0, seconds[kind] - seconds[other])
        for kind, other in zip(drawn, likeliest, strict=True)
    )
    per_draw = max(0.0, drafts - draft) / max(1, rows - few)
    return StepCosts(
        plain=_curve(seconds, kinds[False], limits.max_sequences),
        drafted=_curve(seconds, kinds[True], most),
        width=1 + num_drafts,
        mixing=max(0.0, seconds[mixed] - seconds[decodes]),
        hidden=_hidden(seconds, one, full),
        context=context,
        per_key=max(0.0, seconds[long] - seconds[likeliest[-1]]) / rows / max(1, longer - context),
        draw=plain,
        per_draw=per_draw,
    )


def _twice(kind: Kind) -> Kind:
    return replace(kind, is_twice=True)


def _hidden(seconds: Mapping[Kind, float], one: Kind, full: Kind) -> tuple[float, ...]:
    """Return the seconds that overlap, by decodes: of one, of most, and in between."""
    kinds = [kind for kind in (one, full) if _twice(kind) in seconds]
    if not kinds:
        return ()
    found = [2 * seconds[kind] - seconds[_twice(kind)] for kind in kinds]
    if any(found[i] < NOISE * seconds[kind] for i, kind in enumerate(kinds)):
        return ()
    last = full.num_rows
    return tuple(
        found[0] + (found[-1] - found[0]) * max(0, n - 1) / max(1, last - 1)
        for n in range(last + 1)
    )


def measure_passes(
    timer: StepTimer, costs: StepCosts, context: int, max_step_tokens: int
) -> StepCosts:
    """Add the costs of a draft model's passes. timer: of that model."""
    one, several = (Kind(number, context, has_drafts=False) for number in (1, SEVERAL))
    read = Kind(1, min(context, max_step_tokens), has_drafts=False, is_read=True)
    seconds = timer.seconds([one, several, read], [])
    per_proposal = max(0.0, seconds[several] - seconds[one]) / (SEVERAL - 1)
    per_pass = max(0.0, seconds[one] - per_proposal)
    per_read = max(0.0, seconds[read] - seconds[one]) / max(1, read.context - 1)
    return replace(costs, per_pass=per_pass, per_proposal=per_proposal, per_read=per_read)


def _curve(seconds: Mapping[Kind, float], kinds: Sequence[Kind], most: int) -> tuple[float, ...]:
    return curve({kind.num_rows: seconds[kind] for kind in kinds if kind in seconds}, most)
