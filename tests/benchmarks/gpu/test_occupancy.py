"""How many programs of a compiled kernel fit on a multiprocessor."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu.occupancy import with_programs
from kernels import dry_run
from kernels.configurations import attention_configuration
from tests.kernels.compiled.variants import Variant


def test_a_deeper_pipeline_leaves_room_for_fewer_programs():
    """Each stage except one holds tiles of K and V in 32 KiB. The processor has 228 KiB."""
    variant = Variant("decode", 128)
    with dry_run.target(90):
        row = attention_configuration("decode", 128, variant.group, *variant.formats)
        assert row.num_stages == 3
        assert with_programs("decode", replace(row, programs_per_processor=9), variant.call) == row
        deeper = with_programs("decode", replace(row, num_stages=4), variant.call)
    assert (row.programs_per_processor, deeper.programs_per_processor) == (3, 2)


def test_registers_limit_the_programs_too():
    variant = Variant("decode", 64, (torch.bfloat16, torch.uint8))
    with dry_run.target(90):
        row = attention_configuration("decode", 64, variant.group, *variant.formats)
        wide = with_programs("decode", replace(row, num_warps=16, max_registers=None), variant.call)
    assert wide.programs_per_processor < row.programs_per_processor
