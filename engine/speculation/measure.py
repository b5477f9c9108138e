"""Measures at start what steps cost by their rows, with and without drafts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Groups

from core.configuration.kv_layout import CacheGroup
from core.plan import BlockTable, Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.executor import Executor
from strategies.base import Limits
from strategies.speculation.costs import StepCosts, curve
from strategies.speculation.drafts import drafted

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16, 20, 24, 25, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows to measure, around full tiles of 6 and 12 rows."""
CONTEXT = 256
"""Tokens in the contexts of measured steps, if sequences may be so long."""
LONG = 4
"""How many times longer the contexts are from which the cost of a longer one is measured."""
NUM_TIMES = 3
"""The shortest of so many times counts: others were disturbed."""
MOST_SECONDS = 2.0
"""The time to measure in. Steps of more rows are calculated from those that were measured."""
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.7, top_p=0.9, seed=0)


class StepTimer:
    def __init__(
        self,
        executor: Executor,
        groups: Groups[CacheGroup],
        num_blocks: int,
        vocab_size: int,
        num_drafts: int,
    ) -> None:
        """executor: nobody else uses it, or its K and V, yet."""
        self._executor = executor
        self._groups = groups
        self._num_blocks = num_blocks
        self._num_drafts = num_drafts
        self._tokens = random.Random(0).choices(range(vocab_size), k=LONG * CONTEXT)

    def seconds(
        self,
        num_rows: int,
        context: int,
        *,
        has_drafts: bool,
        params: SamplingParams = GREEDY,
    ) -> float:
        """Return the time of a step with so many rows, each at the end of such a context."""
        times: list[float] = []
        for _ in range(NUM_TIMES):
            plan = StepPlan(tuple(self._chunks(num_rows, context, has_drafts, params)))
            begin = time.perf_counter()
            self._executor.submit(plan, lambda: None).wait()
            times.append(time.perf_counter() - begin)
        return min(times)

    def _chunks(
        self, num_rows: int, context: int, has_drafts: bool, params: SamplingParams
    ) -> Iterator[Chunk]:
        width = 1 + self._num_drafts if has_drafts else 1
        for number, first in enumerate(range(0, num_rows, width)):
            tokens = [*self._tokens[:context]]
            sequence = Sequence(number, tokens, params)
            tables = tuple(self._table(group, number, context + width) for group in self._groups)
            chunk = Chunk(sequence, context - 1, 1, tables, samples_token=True)
            drafts = self._tokens[: min(width, num_rows - first) - 1]
            yield drafted(chunk, tuple(drafts)) if drafts else chunk

    def _table(self, group: CacheGroup, number: int, num_tokens: int) -> BlockTable:
        """Return a table of blocks that other sequences may have too, since nobody reads them."""
        length = group.blocks_for(num_tokens)
        return BlockTable(tuple((number * length + i) % self._num_blocks for i in range(length)))


def measure_costs(
    timer: StepTimer, limits: Limits, num_drafts: int, max_model_len: int
) -> StepCosts:
    """Measure steps in at most some MOST_SECONDS."""
    context = max(1, min(CONTEXT, max_model_len - num_drafts - 1))
    longer = max(context, min(LONG * CONTEXT, max_model_len - num_drafts - 1))
    most = min(limits.max_step_tokens, limits.max_sequences * (1 + num_drafts))
    timer.seconds(1, context, has_drafts=True)  # the first step of a kind may be slow
    plain: dict[int, float] = {}
    with_drafts: dict[int, float] = {}
    deadline = time.perf_counter() + MOST_SECONDS
    for num_rows in (rows for rows in ROWS if rows <= most):
        if plain and time.perf_counter() > deadline:
            break
        if num_rows <= limits.max_sequences:
            plain[num_rows] = timer.seconds(num_rows, context, has_drafts=False)
        with_drafts[num_rows] = timer.seconds(num_rows, context, has_drafts=True)
    rows = min(most, 1 + num_drafts)
    long = timer.seconds(rows, longer, has_drafts=True)
    drawn = timer.seconds(rows, context, has_drafts=True, params=DRAWN)
    short = timer.seconds(rows, context, has_drafts=True)
    return StepCosts(
        plain=curve(plain, limits.max_sequences),
        drafted=curve(with_drafts, most),
        context=context,
        per_key=max(0.0, long - short) / rows / max(1, longer - context),
        per_draw=max(0.0, drawn - short) / rows,
    )
