"""Invalid arguments of the attention wrappers: messages say what is wrong; nothing is launched."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels import dry_run
from kernels.attention.paged_decode import paged_decode
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_work import PrefillWork
from kernels.attention.split_results import scratch_numel
from kernels.attention.work_list import WorkList
from tests.kernels.paged_inputs import make_paged

NAMES = ("query", "key_cache", "value_cache", "block_tables", "context_lens")
DECODE = [(1, 5), (1, 20)]
BLOCK_Q = 64


def misaligned(tensor):
    """Return the same numbers with rows that are one element further apart."""
    wider = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)
    wider[..., :-1] = tensor
    return wider[..., :-1]


def latent_without_its_values(arguments):
    latent = make_paged(DECODE, head_dim=320, value_dim=256)
    rows = {"query": latent.query, "key_cache": latent.key_cache}
    return arguments | rows | {"value_cache": torch.empty_like(latent.key_cache)[..., :256]}


BAD = {
    "or V a part of K's rows": lambda a: a | {"value_cache": a["value_cache"][..., :32]},
    "kernels.attention.sdpa takes any": lambda a: {
        name: tensor[..., :48] if tensor.ndim > 2 else tensor for name, tensor in a.items()
    },
    "block size 8": lambda a: a | {
        name: a[name].view(-1, 8, *a[name].shape[2:]) for name in ("key_cache", "value_cache")
    },
    "cannot be divided evenly among": lambda a: a | {"query": a["query"][:, :3]},
    "the query must be": lambda a: a | {"query": a["query"].double()},
    "both caches must have its dtype": lambda a: a | {"query": a["query"].half()},
    "unless it is fp32": lambda a: a | {
        "query": a["query"].float(),
        "key_cache": a["key_cache"].to(torch.float8_e4m3fn),
        "value_cache": a["value_cache"].to(torch.float8_e4m3fn),
    },
    "query has strides": lambda a: a | {"query": misaligned(a["query"])},
    "key_cache has strides": lambda a: a | {"key_cache": misaligned(a["key_cache"])},
    "allocate them alike": lambda a: a | {
        "value_cache": a["value_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    },
    "block_tables is torch.int16": lambda a: a | {"block_tables": a["block_tables"].short()},
    "context_lens is torch.float32": lambda a: a | {"context_lens": a["context_lens"].float()},
    "one number per head": lambda a: a | {"sinks": torch.zeros(3)},
    "it must be positive": lambda a: a | {"scale": -1.0},
    "must be a view of key_cache": latent_without_its_values,
    "like the query": lambda a: a | {"out": torch.empty_like(a["query"][:1])},
    "out has strides": lambda a: a | {"out": misaligned(a["query"])},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_invalid_arguments(kernel, message):
    paged = make_paged(DECODE)
    arguments = {name: getattr(paged, name) for name in NAMES}
    arguments = BAD[message](arguments)
    arguments.setdefault("scale", 1.0)
    if kernel == "decode":
        call = paged_decode
    else:
        call = partial(paged_prefill, query_starts=paged.query_starts)
    with pytest.raises(ValueError, match=message):
        call(**arguments)


@pytest.mark.parametrize("wrong", [torch.float16, "short", "two dims"])
def test_scratch_must_fit(wrong):
    paged = make_paged(DECODE)
    _, num_heads, head_dim = paged.query.shape
    needed = scratch_numel(4 * BLOCK_Q, num_heads, head_dim)
    scratch = {
        torch.float16: torch.empty(needed).half(),
        "short": torch.empty(needed - 1),
        "two dims": torch.empty(needed, 1),
    }[wrong]
    with pytest.raises(ValueError, match=f"at least {needed} float32"):
        prefill(paged, work=work_for(4), scratch=scratch)


def test_offsets_in_scratch_have_32_bits():
    with pytest.raises(ValueError, match="8388608 results of 4 heads are too many"):
        prefill(make_paged(DECODE), work=work_for(2**23 // BLOCK_Q))


def test_a_work_list_must_fit_the_number_of_sequences():
    paged = make_paged(DECODE)
    work = WorkList(torch.zeros(9, 4).int(), torch.zeros(3, 3).int())
    with pytest.raises(ValueError, match="the work list has 3 sequences"):
        paged_decode(**{name: getattr(paged, name) for name in NAMES}, scale=1.0, work=work)


def test_a_work_list_must_fit_the_number_of_blocks():
    message = "the work list has 7 blocks of tokens, but this batch has 2"
    with dry_run.target(90), pytest.raises(ValueError, match=message):
        prefill(make_paged(DECODE), work=work_for(4, num_blocks=7))


def prefill(paged, **options):
    arguments = {name: getattr(paged, name) for name in NAMES}
    return paged_prefill(**arguments, query_starts=paged.query_starts, scale=1.0, **options)


def work_for(num_splits, num_blocks=2):
    """Return a list with arbitrary contents, as nothing is launched."""
    items, rows = torch.empty(num_splits + num_blocks, 4).int(), torch.empty(2, 3).int()
    return PrefillWork(items, rows, num_splits, BLOCK_Q)
