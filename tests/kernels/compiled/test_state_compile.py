"""Operations of layers with state compiled for every GPU: wide loads of states, no spills.

LONGSHORE_ALL_VARIANTS=1 checks every shape and dtype, and not one of them (`make variants`).
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from kernels import dry_run
from kernels.state.conv_rows import conv_rows
from kernels.state.scan import scan
from kernels.state.state_step import state_step
from kernels.state.state_tiles import state_tiles
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import facts, faults
from tests.kernels.state_inputs import Chunk, make_batch, make_scan, make_tokens

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = (
    (16, 16, 128, 128),  # Qwen 3.5 0.8B
    (16, 32, 128, 128),  # Qwen 3.5 4B and 9B, Qwen 3 Next
    (1, 128, 128, 64),  # Granite 4 H Small
    (8, 128, 128, 64),  # Nemotron-H 8B
    (1, 24, 256, 64),  # Falcon-H1
)
"""Key heads, heads, dims of keys and of values."""
STATE_ARCHS = ARCHS if ALL else ARCHS[-1:]
BATCH = make_batch([Chunk(1, 0, {1: 0}), Chunk(70, -1, {70: 1})])


def variants():
    """Return (heads, dtype, dtype of states): each value of each at least once."""
    if not ALL:
        return [(HEADS[1], torch.bfloat16, torch.float32)]
    return list(zip(HEADS, cycle(DTYPES), cycle((torch.float32, torch.bfloat16))))


def check(launches, arch, variant):
    for launch in launches:
        found = facts(launch.kernel)
        assert not faults(launch.kernel, arch), (variant, launch.name, found)
        assert found.wide_loads > 0, (variant, launch.name, found)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", STATE_ARCHS)
def test_steps(arch):
    for heads, dtype, state_dtype in variants():
        tokens = make_tokens(len(BATCH.writes), heads, dtype)
        states = torch.empty(2, heads[1], *heads[2:], dtype=state_dtype)
        for is_delta in (True, False) if ALL else (True,):
            with dry_run.target(arch) as launches:
                state_step(**tokens, states=states, batch=BATCH, is_delta=is_delta)
            check(launches, arch, (heads, dtype, state_dtype, is_delta))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", STATE_ARCHS)
def test_tiles(arch):
    for heads in HEADS if ALL else HEADS[1:2]:
        tokens = make_tokens(len(BATCH.writes), heads, torch.bfloat16)
        states = torch.empty(2, heads[1], *heads[2:])
        for is_delta in (True, False) if ALL else (True,):
            with dry_run.target(arch) as launches:
                state_tiles(**tokens, states=states, batch=BATCH, is_delta=is_delta)
            check(launches, arch, (heads, is_delta))
            tensor_cores = [facts(launch.kernel).tensor_core_ops > 0 for launch in launches]
            assert tensor_cores == [False, True, True][: 3 if heads[2] <= 128 else 1]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", STATE_ARCHS)
def test_scans(arch):
    for dtype, state_dtype in list(zip(DTYPES, cycle((torch.float32, torch.bfloat16))))[
        : 3 if ALL else 1
    ]:
        tokens = make_scan(len(BATCH.writes), 16, 5120, dtype)
        with dry_run.target(arch) as launches:
            scan(**tokens, states=torch.empty(2, 16, 5120, dtype=state_dtype), batch=BATCH)
        check(launches, arch, (dtype, state_dtype))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", STATE_ARCHS)
def test_convolutions(arch):
    widths = (6144, 2048, 8448) if ALL else (6144,)
    for width, dtype, taps in zip(widths, DTYPES, (4, 3, 4), strict=False):
        rows, weight = (
            torch.empty(71, 3 * width, dtype=dtype),
            torch.empty(taps, width, dtype=dtype),
        )
        before, after, inner = rows.chunk(3, 1)
        tails = torch.empty(2, taps - 1, width, dtype=dtype)
        for options in ({"before": before, "after": after}, {"silu": True}):
            with dry_run.target(arch) as launches:
                conv_rows(inner, weight, weight[0], tails, BATCH, **options)
            assert [launch.name for launch in launches] == ["conv_rows_kernel", "keep_tails_kernel"]
            check(launches, arch, (width, dtype, taps, options.keys()))
