"""A row of attention has the same bits, whatever is computed with it and in whichever chunk.

Products of linear layers, integer layers and logits have such tests in their own files.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from kernels.attention.batch import PagedBatch
from kernels.cpu import elementwise
from kernels.cpu.attention import paged_attention
from tests.kernels.paged_inputs import make_paged

LENGTHS = [700, 41, 1, 260, 90, 16, 600, 257]
CUTS = [1, 2, 3, 4, 5, 7, 13, 16, 33, 64, 100, 256, 300]
"""Lengths of chunks: few rows and many, whole tiles and segments of keys, and others."""


def attend(paged, parts, threads, **options):
    """Compute parts (sequence, first token, end) in one call, and return the rows of each."""
    parts = sorted(parts, key=lambda part: part[2] - part[1] > 1)
    num_decodes = sum(end - first == 1 for _, first, end in parts)
    begins = paged.query_starts.tolist()
    rows = [paged.query[begins[s] + first : begins[s] + end] for s, first, end in parts]
    chunks = [end - first for _, first, end in parts[num_decodes:]]
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    lens = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
    tables = torch.stack([paged.block_tables[s] for s, _, _ in parts])
    batch = PagedBatch(starts, lens, tables, lens[:0], None, num_decodes)
    torch.set_num_threads(threads)
    out = paged_attention(torch.cat(rows), paged.key_cache, paged.value_cache, batch, **options)
    return dict(zip(parts, out.split([len(row) for row in rows]), strict=True))


@pytest.fixture(autouse=True)
def _same_number_of_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


EXTRAS = {"plain": {}, "window": {"window": 100, "softcap": 5.0}, "sinks": {"window": 300}}


@pytest.mark.matrix
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("heads", [(4, 4, 32), (6, 2, 80), (16, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_chunk_and_batch(target, dtype, heads, extras):
    options = {"scale": 0.2, **EXTRAS[extras]}
    if extras == "sinks":
        options["sinks"] = torch.linspace(-2, 2, heads[0])
    paged = make_paged(
        [(length, length) for length in LENGTHS], heads=heads[:2], head_dim=heads[2], dtype=dtype
    )
    expected = [
        attend(paged, [(s, 0, length)], 1, **options)[s, 0, length]
        for s, length in enumerate(LENGTHS)
    ]
    rng = random.Random(0)
    for threads in (1, 2, 3, 1):
        for count in (1, 1, 2, 3, len(LENGTHS)):
            parts = []
            for sequence in rng.sample(range(len(LENGTHS)), count):
                end = rng.choice([LENGTHS[sequence], rng.randint(1, LENGTHS[sequence])])
                parts.append((sequence, max(0, end - rng.choice(CUTS)), end))
            for (sequence, first, end), rows in attend(paged, parts, threads, **options).items():
                assert torch.equal(rows, expected[sequence][first:end]), (sequence, first, end)


ACTIVATIONS = {
    "silu": lambda rows: elementwise.gated_activation(rows, "silu"),
    "gelu_tanh": lambda rows: elementwise.gated_activation(rows, "gelu_tanh"),
    "sigmoid": elementwise.sigmoid,
    "sigmoid gate": lambda rows: elementwise.sigmoid_gate(*rows.tensor_split(2, 1)),
    "gelu": elementwise.gelu,
    "plain gelu_tanh": elementwise.gelu_tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 37, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_has_the_same_bits_at_any_place(dtype, width, name):
    """torch's own have not if the width is odd, or if a tensor is split among threads."""
    rows = (torch.randn(3001, 2 * width) * 3).to(dtype)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        whole = ACTIVATIONS[name](rows)
        for start, end in ((0, 1), (1, 2), (5, 40), (17, 2000), (2999, 3001)):
            assert torch.equal(ACTIVATIONS[name](rows[start:end].clone()), whole[start:end])
    expected = {
        "silu": lambda rows: F.silu(rows[:, :width]) * rows[:, width:],
        "gelu_tanh": lambda rows: F.gelu(rows[:, :width], approximate="tanh") * rows[:, width:],
        "sigmoid": torch.sigmoid,
        "sigmoid gate": lambda rows: torch.sigmoid(rows[:, :width]) * rows[:, width:],
        "gelu": F.gelu,
        "plain gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
    }[name](rows.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
