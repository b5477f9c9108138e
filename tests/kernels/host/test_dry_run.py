"""The dry run compiles what would be launched, and the static check finds known defects."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from kernels import dry_run
from tests.kernels.compiled.static_check import facts, faults


@triton.jit
def copy_kernel(source, target, stride, SIZE: tl.constexpr):
    index = tl.program_id(0) * stride + tl.arange(0, SIZE)
    tl.store(target + index, tl.load(source + index))


@triton.jit
def square_kernel(a, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    square = index[:, None] * SIZE + index[None, :]
    tile = tl.load(a + square)
    tl.store(out + square, tl.dot(tile, tile))


def launch_copy(source, stride):
    out = torch.full_like(source, -1)
    copy_kernel[(2,)](source, out, stride, SIZE=1024)
    return out


def test_a_launch_is_compiled_and_recorded_and_does_not_run():
    with dry_run.target(90) as launches:
        out = launch_copy(torch.zeros(2048, dtype=torch.float16), 1024)
    (launch,) = launches
    assert (launch.name, launch.grid) == ("copy_kernel", (2,))
    assert launch.kernel.metadata.target.arch == 90
    assert (out == -1).all()


def test_torch_reports_the_target_and_the_driver_is_restored():
    before = driver._active
    with dry_run.target(86):
        assert torch.cuda.get_device_capability() == (8, 6)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 80
        assert driver.active.get_current_target().arch == 86
    assert driver._active is before


def test_wide_and_narrow_access_are_distinguished():
    source = torch.zeros(4096, dtype=torch.float16)
    with dry_run.target(80) as launches:
        launch_copy(source, 1024)
        launch_copy(source, 1023)  # rows that are not aligned to 16 bytes
    wide, narrow = (facts(launch.kernel) for launch in launches)
    assert min(wide.wide_loads, wide.wide_stores) > 0
    assert max(wide.narrow_loads, wide.narrow_stores) == 0
    assert min(narrow.narrow_loads, narrow.narrow_stores) > 0
    assert narrow.wide_loads == 0


def test_tensor_cores_and_spills_are_found():
    with dry_run.target(80) as launches:
        half, single = torch.zeros(64, 64).half(), torch.zeros(64, 64)
        square_kernel[(1,)](half, single, SIZE=64)
        square_kernel[(1,)](half, single, SIZE=64, maxnreg=32)
    good, bad = (launch.kernel for launch in launches)
    assert facts(good).tensor_core_ops
    assert not faults(good, 80)
    assert any("spills" in fault for fault in faults(bad, 80))
