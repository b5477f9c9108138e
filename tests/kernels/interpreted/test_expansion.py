"""A step in which some latents are expanded, with poison wherever the cache holds none."""

from __future__ import annotations

import pytest
import torch

from core.configuration.kv_layout import KVLayout, LayerShape
from engine.attention.call import AttentionCall
from engine.attention.expansion import expansion_of
from engine.attention.kv_cache import KVCache
from engine.attention.triton_backend import TritonBackend
from kernels.attention.batch import PagedBatch
from kernels.attention.latents import expand_latents
from tests.kernels.paged_inputs import make_paged
from tests.kernels.reference import paged_prefill_reference

RANK, ROPE, NOPE, VALUE, HEADS = 256, 64, 128, 128, 3
SCALE = 0.1
LENGTHS = [(1, 40), (1, 7), (20, 20), (5, 70), (9, 25)]
"""Two decodes, a prompt, a chunk that is not expanded, and one that is, with its prefix."""


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("num_others", [3, 0, 2])
def test_expanded_and_absorbed_sequences_of_a_step(num_others):
    """num_others: sequences that are not expanded: none, the decodes, or a chunk as well."""
    lengths = LENGTHS[2:3] + LENGTHS[4:] if num_others == 0 else LENGTHS
    paged = make_paged(lengths, heads=(1, 1), head_dim=RANK + ROPE, dtype=torch.float32)
    cache = KVCache(
        [LayerShape(1, RANK + ROPE, 0, shared_dim=RANK)],
        len(paged.key_cache), KVLayout.uniform(16), torch.float32, torch.device("cpu"),
    )  # fmt: skip
    batch, query = make_batch(paged, lengths), torch.randn(len(paged.query), HEADS, NOPE + ROPE)
    key_up, value_up = torch.randn(HEADS, NOPE, RANK) / 16, torch.randn(HEADS, RANK, VALUE) / 16
    expected = definition(paged, query, key_up, value_up)
    # The new rows are written by the step.
    cache.keys[0].copy_(paged.key_cache)
    slots = batch.slot_mapping
    key = paged.key_cache.flatten(0, 1)[slots].clone()
    cache.keys[0].view(-1, 1, RANK + ROPE)[slots] = float("nan")

    expansion = expansion_of(
        batch, cache, TritonBackend(4, 128), (NOPE + ROPE, VALUE),
        lambda new, context, rows: (new, context) != (5, 70) or num_others == 2,
    )  # fmt: skip
    assert expansion is not None
    out = expansion.attend(call(query, key), lambda rows: expand_latents(rows, key_up, value_up))
    if num_others == 0:
        assert expansion.others is None
    else:
        tokens = expansion.others
        assert len(tokens) == (2 if num_others == 2 else 7)
        plain, rotated = query[tokens].split([NOPE, ROPE], -1)
        absorbed = torch.cat([torch.einsum("thn,hnr->thr", plain, key_up), rotated], -1)
        attended = expansion.attend_others(call(absorbed, key))
        out[tokens] = torch.einsum("thr,hrv->thv", attended, value_up)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def make_batch(paged, lengths):
    num_decodes = sum(new == 1 for new, _ in lengths)
    starts = paged.query_starts.tolist()
    slots = [
        int(paged.block_tables[row, position // 16]) * 16 + position % 16
        for row, (new, context) in enumerate(lengths)
        for position in range(context - new, context)
    ]
    spans = zip(starts, starts[1:], (context for _, context in lengths), strict=False)
    return PagedBatch(
        paged.query_starts[num_decodes:] - num_decodes,
        paged.context_lens,
        paged.block_tables,
        torch.tensor(slots),
        tuple(spans),
        num_decodes,
    )


def call(query, key):
    return AttentionCall(0, query, key, key[..., :0], SCALE, None, None, None, shared_dim=RANK)


def definition(paged, query, key_up, value_up):
    """Return attention over K and V of all rows, in fp64."""
    rows = paged.key_cache.double().flatten(0, 2)
    joined = expand_latents(rows, key_up.double(), value_up.double())
    blocks = joined.unflatten(0, (-1, 16)).tensor_split([NOPE + ROPE], -1)
    others = paged.block_tables, paged.query_starts, paged.context_lens
    return paged_prefill_reference(query, *blocks, *others, scale=SCALE)
