"""The sampler's kernels compiled for every GPU: no spills, and 16-byte loads where rows allow.

LONGSHORE_ALL_VARIANTS=1 checks the whole matrix and not a sample of it (`make variants`).
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels import dry_run
from kernels.sampling.best_tokens import best_tokens
from kernels.sampling.candidates import collect_candidates
from kernels.sampling.draw_tokens import draw_tokens
from kernels.sampling.filter_limits import filter_limits
from kernels.sampling.token_weights import DrawnRows
from tests.kernels.compiled.gpus import ALL, ARCHS
from tests.kernels.compiled.static_check import facts, faults

FP32, BF16 = torch.float32, torch.bfloat16
READS_LOGITS = {
    "best_of_chunk_kernel", "collect_candidates_kernel", "chunk_masses_kernel", "draw_tokens_kernel"
}  # fmt: skip


def variants(arch):
    """Return (vocabulary size, dtype). GPT-2's size, 50257, is a multiple of neither 16 nor 2."""
    if not ALL:
        few = [(151936, BF16), (128256, FP32)]
        return [few[ARCHS.index(arch)]]
    sizes = (1000, 32000, 50257, 128256, 151936, 262144)
    return product(sizes, (FP32, BF16, torch.float16))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_kernels_meet_the_requirements(arch):
    for vocab_size, dtype in variants(arch):
        for launch in compiled(arch, vocab_size, dtype):
            variant, found = (launch.name, vocab_size, dtype), facts(launch.kernel)
            assert not faults(launch.kernel, arch), (variant, found)
            # With at most 128 registers, two programs of eight warps fit on a multiprocessor.
            assert found.registers <= 128, (variant, found)
            if launch.name in READS_LOGITS and vocab_size % 16 == 0:
                assert found.wide_loads > 0, (variant, found)
                # The only narrow load is that of the row's highest logit.
                assert found.narrow_loads <= (dtype != FP32), (variant, found)


@pytest.mark.parametrize("vocab_size", [97, 1000])
def test_a_single_row_has_the_code_of_many(vocab_size):
    """Other code would add the numbers of a row in another order, and so give it other bits."""
    hashes = []
    for num_rows in (1, 24):
        with dry_run.target(90) as launches:
            best_tokens(torch.empty(num_rows, vocab_size))
        hashes.append([launch.kernel.hash for launch in launches])
    assert hashes[0] == hashes[1]


def test_rows_and_sizes_compile_no_variants():
    """Sizes matter only by their divisibility and by the number of chunks, rounded up to a power of
    two."""
    first, second = (
        [launch.kernel.hash for launch in compiled(90, size, FP32, rows)]
        for size, rows in ((128256, 3), (131072 - 16, 64))
    )
    assert first == second


def compiled(arch, vocab_size, dtype, num_rows=3):
    logits = torch.empty(num_rows, vocab_size, dtype=dtype)
    token_ids = torch.zeros(num_rows, dtype=torch.int64)
    ones = torch.ones(num_rows)
    drawn_rows = DrawnRows(token_ids, ones, ones, token_ids, ones.double(), ones.double())
    with dry_run.target(arch) as launches:
        best_tokens(logits)
        limits = filter_limits(collect_candidates(logits, token_ids, drawn_rows), drawn_rows)
        draw_tokens(logits, token_ids, drawn_rows, limits, ones.double())
    assert len(launches) == 6
    return launches
