"""Times linear layers, attention and states of the C++ library, beside those of another checkout.

    python tests/kernels/cpu/times.py --base ../before --repeats 9

Run it before and after every change of kernels/cpu/tiles.h: a product that no longer keeps its sums
in registers gives the same numbers and takes three times as long. Times are CPU time of one thread,
in ms; both checkouts run in turns, and the minimum of all runs counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONTEXTS = {"decode 1 at 330": [(1, 330)], "decode 1 at 1000": [(1, 1000)],
            "decode 50 at 330": [(1, 330)] * 50, "prompt of 512": [(512, 512)],
            "tokens 512 to 1000": [(488, 1000)]}  # fmt: skip
"""Query tokens and context of each sequence."""


def linear_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch

    from engine.model.linear import Panels
    from engine.model.quantization.at_load import quantize_weight
    from engine.model.quantization.formats import make_format

    weight = torch.randn(2048, 768)
    quantized = quantize_weight(weight, "int8", torch.device("cpu"))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.float32)):
        stored = weight if name == "fp32" else weight.bfloat16()
        form = Panels.of([stored], dtype)
        if name == "int8":
            form = make_format([quantized], torch.device("cpu"), dtype)
        for num_rows in (1, 8, 64, 512):
            rows = torch.randn(num_rows, 768).to(dtype)
            yield f"linear {name}, {num_rows} rows", lambda f=form, r=rows: f.multiply(r, None)


def attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch

    from kernels.attention.batch import PagedBatch
    from kernels.cpu.attention import paged_attention

    for dtype in (torch.float32, torch.bfloat16):
        for heads, kv_heads, dim in ((12, 4, 64), (12, 12, 64), (16, 2, 128)):
            for name, sequences in CONTEXTS.items():
                blocks = [-(-context // 16) for _, context in sequences]
                keys, values = (
                    torch.randn(sum(blocks), kv_heads, 16, dim).to(dtype).transpose(1, 2)
                    for _ in range(2)
                )
                ids = torch.arange(sum(blocks), dtype=torch.int32).split(blocks)
                tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
                lens = torch.tensor([context for _, context in sequences], dtype=torch.int32)
                num_decodes = sum(new == 1 for new, _ in sequences)
                chunks = [new for new, _ in sequences][num_decodes:]
                starts = torch.tensor([0, *chunks]).cumsum(0).int()
                batch = PagedBatch(starts, lens, tables, lens[:0], None, num_decodes)
                query = torch.randn(num_decodes + sum(chunks), heads, dim).to(dtype)
                kind = f"{str(dtype)[6:]} {heads}/{kv_heads}x{dim}"
                yield (
                    f"attention {kind}, {name}",
                    lambda q=query, k=keys, v=values, b=batch: paged_attention(
                        q, k, v, b, scale=0.1
                    ),
                )


def state_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield steps of one layer of Qwen3.5-0.8B, beside a copy of the states that decodes update.

    Each call takes other slots than the one before, so that states come from memory.
    """
    import torch

    from kernels.cpu.state import conv_rows, state_step
    from kernels.state.batch import StateBatch

    heads, dim, taps = 16, 128, 4
    pool = torch.zeros(256, heads, dim, dim)
    tails = torch.zeros(256, taps - 1, 3 * heads * dim)
    weight = torch.randn(taps, tails.shape[2])
    for num_sequences, length in ((1, 1), (32, 1), (1, 512)):
        size = num_sequences * length
        rows = torch.randn(size, tails.shape[2])
        query, key, value = (part.unflatten(1, (-1, dim)) for part in rows.chunk(3, 1))
        gates = -torch.rand(size, heads), torch.rand(size, heads)
        starts = torch.arange(0, size + 1, length, dtype=torch.int32)
        batches = []
        for slots in torch.arange(256).split(num_sequences):
            writes = torch.full((size,), -1).index_copy(0, starts[1:].long() - 1, slots)
            batches.append(StateBatch(starts, slots, writes, None))
        turns, kind = itertools.cycle(batches), f"{num_sequences} x {length} tokens"
        for is_delta, name in ((True, "delta rule"), (False, "Mamba-2")):
            yield (
                f"{name}, {kind}",
                lambda rows=(query, key, value, *gates), turns=turns, d=is_delta: state_step(
                    *rows, pool, next(turns), is_delta=d
                ),
            )
        yield (
            f"convolution, {kind}",
            lambda rows=rows, turns=turns: conv_rows(
                rows, weight, None, tails, next(turns), silu=True
            ),
        )
        if length == 1:
            parts = [half.split(num_sequences) for half in pool.chunk(2)]
            pairs = itertools.cycle(zip(*parts, strict=True))
            yield f"copy of {num_sequences} states", lambda p=pairs: torch.Tensor.copy_(*next(p))


def measure(seconds: float) -> dict[str, float]:
    """Return the minimum of each case. seconds: the time spent on a case."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    best = {}
    for name, case in (*linear_cases(), *attention_cases(), *state_cases()):
        case()
        end, times = time.monotonic() + seconds, []
        while time.monotonic() < end or len(times) < 3:
            start = time.process_time()
            case()
            times.append((time.process_time() - start) * 1e3)
        best[name] = min(times)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="another checkout; none: only this one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.15, help="for one case in one run")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(measure(args.seconds)))
        return
    roots = [args.base.resolve(), ROOT] if args.base else [ROOT]
    best: list[dict[str, float]] = [{} for _ in roots]
    command = [sys.executable, __file__, "--in-process", "--seconds", str(args.seconds)]
    for _ in range(args.repeats):
        for times, root in zip(best, roots, strict=True):
            environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            for name, value in json.loads(done.stdout).items():
                times[name] = min(value, times.get(name, value))
    for name, value in best[-1].items():
        ratio = f"{value / best[0][name]:6.2f} of {best[0][name]:9.3f}" if args.base else ""
        print(f"{name:50} {value:9.3f} ms {ratio}")


if __name__ == "__main__":
    main()
