"""paged_prefill with tensor descriptors in Triton's interpreter; see ../conftest.py.

Unused blocks, and slots past a context, hold NaN.
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernels.attention.cache_descriptors import describe_caches
from kernels.attention.paged_prefill import paged_prefill, prefill_work
from kernels.reference import paged_prefill_reference
from tests.kernels.paged_inputs import check_close, make_paged

SCALE = 0.1
RAGGED = [(3, 3), (70, 70), (0, 90), (64, 128), (1, 131), (129, 400), (5, 64), (20, 333)]
"""Whole prompts, chunks after a prefix, a decode row, a sequence without tokens."""


@pytest.fixture
def loads(monkeypatch):
    """Return a list to which each load by a descriptor adds its cache's address and its block."""
    found = []
    load = InterpreterBuilder.create_descriptor_load

    def spy(self, descriptor, indices, *options):
        found.append((int(descriptor.base.data.item()), int(indices[0].data.item())))
        return load(self, descriptor, indices, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_load", spy)
    return found


def check(lengths, loads, options=None, *, num_splits=0, block_size=64, **shape):
    """Compare with the reference, and bit for bit with a run that loads by pointers."""
    paged = make_paged(lengths, block_size=block_size, **shape)
    options = (options or {}) | {"scale": SCALE}
    sizes = (paged.query, paged.key_cache, paged.query_starts, paged.context_lens)
    work = prefill_work(*sizes, num_splits, min_split_keys=1)
    assert (work.items[:num_splits, 0] >= 0).any() == (num_splits > 0)
    plain = paged_prefill(*paged.prefill_arguments, work=work, **options)
    assert not loads
    described = describe_caches(paged.key_cache, paged.value_cache)
    out = torch.full_like(paged.query, float("nan"))
    given = {"work": work, "descriptors": described, "out": out}
    paged_prefill(*paged.prefill_arguments, **given, **options)
    check_close(out, paged_prefill_reference(*paged.prefill_arguments, **options))
    assert torch.equal(out, plain)
    assert loads, "no tile was loaded by a descriptor"
    return paged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (7, 1), (12, 4)])
def test_a_ragged_batch(heads, dtype, loads):
    check(RAGGED, loads, heads=heads, dtype=dtype)


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(80, 64), (96, 64), (128, 64), (192, 32), (256, 32)]
)
def test_head_dims(head_dim, block_size, loads):
    """For head dims 80, 96 and 192, a descriptor's box is wider than a head. The rest is read as
    zero."""
    check([(5, 200), (70, 70)], loads, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("layout", ["HND", "pair"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_layouts(layout, ids, loads):
    check([(5, 200), (70, 70)], loads, layout=layout, ids=ids, heads=(6, 3))


def test_softcap_and_sinks(loads):
    check(RAGGED, loads, {"softcap": 3.0, "sinks": torch.tensor([-40.0, 0.0, 5.0, 40.0])})


@pytest.mark.parametrize(("lengths", "num_splits"), [([(20, 400), (3, 3)], 12), (RAGGED, 60)])
def test_splits(lengths, num_splits, loads):
    check(lengths, loads, num_splits=num_splits, heads=(4, 1))


def test_only_blocks_that_all_rows_see_are_loaded_by_descriptors(loads):
    """A tile has 128 query tokens. The first token of the first tile, at position 300, sees 4 whole
    blocks of 64 keys. The first token of the second tile, at position 428, sees 6. The blocks after
    these need masks."""
    paged = check([(150, 450)], loads, heads=(1, 1))
    blocks = paged.block_tables[0].tolist()
    caches = (paged.key_cache.data_ptr(), paged.value_cache.data_ptr())
    expected = [(cache, block) for n in (4, 6) for block in blocks[:n] for cache in caches]
    assert sorted(loads) == sorted(expected)
