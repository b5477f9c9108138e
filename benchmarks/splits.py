"""Decode by the engine's work list, and by lists that split all contexts into equally many parts.

Earlier versions had no work lists and split all contexts equally. The number of splits depended on
the longest context that the model allows. Here, lists with those numbers of splits run on today's
kernels.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.bench import Bench
from benchmarks.decode import MODEL_LENGTH, decode_calls, wanted_by_rule
from benchmarks.inputs import DRY_SHAPES, SHAPES, Lengths, PagedInputs, Shape, make_inputs, ragged
from kernels.attention.work_list import MIN_SPLIT_KEYS, UNIT, WorkList, make_work_list

ALL = (1, 2, 4, 8, 16, 64)


def run(bench: Bench) -> None:
    shape = DRY_SHAPES[1] if bench.is_dry else SHAPES[1]
    for name, contexts in _dry_cases() if bench.is_dry else _cases():
        if bench.has_no_time_for(f"{name} and the remaining cases"):
            return
        bench.attempt(name, partial(_measure, bench, shape, name, contexts))


def equal_splits(inputs: PagedInputs, num_splits: int) -> WorkList:
    """Divide each context into `num_splits`, or fewer to keep MIN_SPLIT_KEYS keys in each."""
    items, rows = [], []
    for row, context in enumerate(inputs.lengths.contexts):
        count = max(1, min(num_splits, context // MIN_SPLIT_KEYS))
        units = -(-context // UNIT)
        ends = [min((split + 1) * units // count * UNIT, context) for split in range(count)]
        spans = zip([0, *ends], ends, strict=False)
        rows.append([row, len(items), count])
        items += [[row, begin, end, count] for begin, end in spans]
    idle = [[-1] * 4] * (len(rows) * num_splits - len(items))
    return WorkList(*(_int32(numbers, inputs) for numbers in (items + idle, rows)))


def splits_by_old_rule(num_rows: int, num_kv_heads: int, num_processors: int) -> int:
    """Return the number of splits of every context by the rule before work lists."""
    to_fill = -(-2 * num_processors // (num_rows * num_kv_heads))
    wanted = min(max(to_fill, min(-(-MODEL_LENGTH // 8192), 4)), 64)
    return 1 << (wanted - 1).bit_length()


def _cases() -> list[tuple[str, tuple[int, ...]]]:
    return [
        ("one of 128k, 255 of 500", (131072, *[500] * 255)),
        ("64 x ≤16384", ragged(64, 16384)),
        ("1 x 16384", (16384,)),
        ("16 x 4096", (4096,) * 16),
        ("64 x 4096", (4096,) * 64),
        ("256 x 500", (500,) * 256),
        ("16 x 16384", (16384,) * 16),
    ]


def _dry_cases() -> list[tuple[str, tuple[int, ...]]]:
    return [("one of 1100, 2 of 24", (1100, 24, 24))]


def _measure(bench: Bench, shape: Shape, name: str, contexts: tuple[int, ...]) -> None:
    lengths = Lengths((1,) * len(contexts), contexts)
    kv_bytes = lengths.kv_bytes(shape, bench.dtype.itemsize)
    inputs = make_inputs(
        shape, lengths, device=bench.device, dtype=bench.dtype, num_sets=bench.num_sets(kv_bytes)
    )
    old = splits_by_old_rule(len(contexts), shape.kv_heads, bench.num_processors)
    wanted = wanted_by_rule(bench, inputs)
    rule = make_work_list(inputs.context_lens, wanted)
    works = {"rule": rule, "old rule": equal_splits(inputs, old)}
    works |= {str(num): equal_splits(inputs, num) for num in (ALL[:2] if bench.is_dry else ALL)}
    us = {
        label: bench.time_us(decode_calls(bench, inputs, shape, work))
        for label, work in works.items()
    }
    making = [partial(make_work_list, inputs.context_lens, wanted)]
    bench.row(
        shape=str(shape),
        contexts=name,
        items=len(rule.items),
        us=us,
        **{"splits by old rule": old, "list us": bench.time_us(making)},
    )


def _int32(numbers: list[list[int]], inputs: PagedInputs) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=inputs.context_lens.device)
