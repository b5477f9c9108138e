"""Prefill by work list: the engine's list, the even splits of earlier versions, and no splits.

Earlier versions had no work lists. They split all blocks of query tokens into equally many parts,
even blocks without tokens. Here, lists of such splits run on today's kernels.
"""

from __future__ import annotations

import operator
from functools import partial
from itertools import pairwise

import torch

from benchmarks.bench import Bench
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, PagedInputs, Shape, make_inputs
from benchmarks.prefill import prefill_calls, work_by_rule
from kernels.attention.paged_prefill import prefill_work, tiling
from kernels.attention.prefill_work import MIN_SPLIT_KEYS, PrefillWork
from kernels.attention.work_list import WAVES
from kernels.configurations import AttentionConfiguration, attention_configuration

MAX_SPLITS = 64
"""Maximum splits of each block, by the old rule."""
LONG = 131072
CASES = (
    ("20 over 30000 cached", Lengths((20,), (30020,))),
    ("20 over 128k, 60 prompts of 500", Lengths((20, *[500] * 60), (LONG + 20, *[500] * 60))),
    ("20 over 128k cached", Lengths((20,), (LONG + 20,))),
    ("20 over 128k, prompt of 2000", Lengths((20, 2000), (LONG + 20, 2000))),
    ("100 over 8192 cached", Lengths((100,), (8292,))),
    ("512 over 8192 cached", Lengths((512,), (8704,))),
    ("544 over 8192 cached", Lengths((544,), (8736,))),
    ("prompt of 4096", Lengths((4096,), (4096,))),
)
DRY_CASES = (("3 over 1100 cached, prompt of 9", Lengths((3, 9), (1103, 9))),)


def run(bench: Bench) -> None:
    for shape in DRY_SHAPES[1:] if bench.is_dry else reversed(SHAPES):
        for name, lengths in DRY_CASES if bench.is_dry else CASES:
            case = f"{shape} {name}"
            if bench.has_no_time_for(f"{case} and the remaining cases"):
                return
            bench.attempt(case, partial(_measure, bench, shape, name, lengths))


def even_splits(inputs: PagedInputs, num_splits: int) -> PrefillWork:
    """Divide each block's keys into `num_splits`, or fewer to keep MIN_SPLIT_KEYS keys in each."""
    tile = _tile(inputs)
    block_q, _ = tiling(inputs.query, inputs.key_cache, tile)
    splits: list[list[int]] = []
    whole: list[list[int]] = []
    rows: list[list[int]] = []
    for sequence, (start, end, context) in enumerate(inputs.batch(inputs.tables[0]).host_spans()):
        for first in range(start, end, block_q):
            end_key = min(context - end + first + block_q, context)
            count = max(1, min(num_splits, end_key // MIN_SPLIT_KEYS))
            tiles = -(-end_key // tile.block_n)
            ends = [split * tiles // count for split in range(count + 1)]
            items = [[sequence, first - start, *span] for span in pairwise(ends)]
            if count > 1:
                slot = len(splits) * block_q
                block = range(first, min(first + block_q, end))
                rows += [[row, slot + row - first, count] for row in block]
            (splits if count > 1 else whole).extend(items)
    num_blocks = len(inputs.query) // block_q + len(inputs.context_lens)
    idle = [[-1] * 4] * (num_blocks - len(whole))
    items, rows = [*splits, *reversed(whole), *idle], rows or [[0] * 3]
    return PrefillWork(_int32(items, inputs), _int32(rows, inputs), len(splits), block_q)


def splits_by_old_rule(bench: Bench, inputs: PagedInputs) -> int:
    """Return the number of splits of every block by the rule before work lists."""
    tile, lengths = _tile(inputs), inputs.lengths
    block_q, num_tiles = tiling(inputs.query, inputs.key_cache, tile)
    num_programs = bench.num_processors * tile.programs_per_processor
    longest = max(lengths.contexts)
    blocks = [-(-new // block_q) for new in lengths.queries]
    work = num_tiles * sum(map(operator.mul, blocks, lengths.contexts))
    num_blocks = len(inputs.query) // block_q + len(lengths.queries)
    max_wanted = WAVES * num_programs // (num_tiles * num_blocks)
    return max(
        1, min(longest * num_programs // work, max_wanted, longest // MIN_SPLIT_KEYS, MAX_SPLITS)
    )


def _measure(bench: Bench, shape: Shape, name: str, lengths: Lengths) -> None:
    num_sets = bench.num_sets(lengths.kv_bytes(shape, bench.dtype.itemsize), max_sets=4)
    inputs = make_inputs(shape, lengths, device=bench.device, dtype=bench.dtype, num_sets=num_sets)
    old = splits_by_old_rule(bench, inputs)
    rule = work_by_rule(bench, inputs)
    works = {"rule": rule, "old rule": even_splits(inputs, old), "unsplit": None}
    us = {label: bench.time_us(prefill_calls(inputs, work)) for label, work in works.items()}
    sizes = (inputs.query, inputs.key_cache, inputs.query_starts, inputs.context_lens)
    making = [partial(prefill_work, *sizes, rule.num_splits)]
    bench.row(
        shape=str(shape),
        tokens=name,
        items=len(rule.items),
        flop=lengths.flop(shape),
        us=us,
        **{"splits by old rule": old, "list us": bench.time_us(making)},
    )


def _tile(inputs: PagedInputs) -> AttentionConfiguration:
    query, cache = inputs.query, inputs.key_cache
    group = query.shape[1] // cache.shape[2]
    return attention_configuration("prefill", query.shape[2], group, query.dtype, cache.dtype)


def _int32(numbers: list[list[int]], inputs: PagedInputs) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=inputs.context_lens.device)
