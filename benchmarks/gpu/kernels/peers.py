"""Other attention implementations, each as calls that a CUDA graph can capture."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.paged_inputs import PagedInputs, Shape

Calls = list[Callable[[], Any]]
WORKSPACE_BYTES = 128 * 2**20
"""FlashInfer's recommended workspace size."""


def sdpa_decode(inputs: PagedInputs, shape: Shape) -> Calls:
    """Return a call of SDPA for each input set, over contiguous K/V [N, kv_heads, L, D].

    The query heads of a GQA group are passed as queries of one KV head, so that K/V are read once.
    All contexts must have the same length.
    """
    num_rows, length = len(inputs.lengths.contexts), inputs.lengths.contexts[0]
    query = inputs.query.view(num_rows, shape.kv_heads, -1, shape.head_dim)
    return [
        lambda keys=keys, values=values: _sdpa(SDPBackend.FLASH_ATTENTION, query, keys, values)
        for keys, values in _contiguous(inputs, shape, num_rows, length)
    ]


def sdpa_prefill(inputs: PagedInputs, shape: Shape, backend: SDPBackend) -> Calls:
    """Return a call of SDPA for each input set, over whole prompts of one length.

    Tensors are contiguous [N, heads, L, D].
    """
    num_rows, length = len(inputs.lengths.contexts), inputs.lengths.contexts[0]
    query = inputs.query.view(num_rows, length, shape.heads, -1).transpose(1, 2).contiguous()
    return [
        lambda keys=keys, values=values: _sdpa(
            backend, query, keys, values, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
        )
        for keys, values in _contiguous(inputs, shape, num_rows, length)
    ]


def flashinfer_decode(inputs: PagedInputs, shape: Shape, layout: str = "NHD") -> Calls:
    """Return a call of FlashInfer for each block table, on the same caches."""
    flashinfer: Any = importlib.import_module("flashinfer")
    make = partial(
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        use_tensor_cores=shape.heads // shape.kv_heads >= 4,
    )
    return _flashinfer(make, inputs, shape, layout)


def flashinfer_prefill(inputs: PagedInputs, shape: Shape, layout: str = "NHD") -> Calls:
    """Return a call of FlashInfer for each block table, on the same caches."""
    flashinfer: Any = importlib.import_module("flashinfer")
    make = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    return _flashinfer(make, inputs, shape, layout, inputs.query_starts, causal=True)


def flashinfer_latents(inputs: PagedInputs, shape: Shape) -> Calls:
    """Return a call of FlashInfer's attention over latents for each block table.

    Its latents and rotated keys are two tensors, here copies of the two parts of our rows. All
    sequences must be decodes, and the layout NHD.
    """
    mla: Any = importlib.import_module("flashinfer.mla")
    latent_dim, workspace = shape.value_dim, _workspace(inputs)
    dims = (latent_dim, shape.head_dim - latent_dim)
    query, caches = (
        [part.contiguous() for part in rows.split(dims, -1)]
        for rows in (inputs.query, inputs.key_cache[:, :, 0])
    )
    types, out = (inputs.query.dtype, inputs.key_cache.dtype), inputs.new_out()
    block_size = inputs.key_cache.shape[1]
    calls: Calls = []
    for table in inputs.tables:
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace)
        starts, pages, _ = page_lists(inputs, table, block_size)
        lengths = (inputs.query_starts, starts, pages, inputs.context_lens)
        sizes = (shape.heads, *dims, block_size)
        wrapper.plan(*lengths, *sizes, False, inputs.scale, *types)
        calls.append(lambda wrapper=wrapper: wrapper.run(*query, *caches, out=out))
    return calls


def _flashinfer(
    make: Callable[..., Any],
    inputs: PagedInputs,
    shape: Shape,
    layout: str,
    *starts: Tensor,
    **options: Any,
) -> Calls:
    """Return a call for each block table of a wrapper by `make`. Planning happens here, untimed.

    starts: `query_starts` in prefill, else nothing. options: further arguments of `plan`.
    """
    options |= {"kv_data_type": inputs.key_cache.dtype, "sm_scale": inputs.scale}
    caches, workspace = _as_stored(inputs, layout), _workspace(inputs)
    block_size = inputs.key_cache.shape[1]
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, block_size)
    calls: Calls = []
    for table in inputs.tables:
        wrapper = make(workspace, layout)
        pages = page_lists(inputs, table, block_size)
        wrapper.plan(*starts, *pages, *sizes, q_data_type=inputs.query.dtype, **options)
        calls.append(lambda wrapper=wrapper: wrapper.run(inputs.query, caches))
    return calls


def _sdpa(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Any:
    with _only(backend, query.device):
        return F.scaled_dot_product_attention(query, keys, values, **options)


def _only(backend: SDPBackend, device: torch.device) -> AbstractContextManager[Any]:
    return sdpa_kernel(backend) if device.type == "cuda" else nullcontext()


def _contiguous(
    inputs: PagedInputs, shape: Shape, num_rows: int, length: int
) -> list[tuple[Tensor, Tensor]]:
    def make() -> Tensor:
        size = (num_rows, shape.kv_heads, length, shape.head_dim)
        return torch.randn(size, dtype=inputs.query.dtype, device=inputs.query.device)

    return [(make(), make()) for _ in inputs.tables]


def _workspace(inputs: PagedInputs) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.query.device)


def _as_stored(inputs: PagedInputs, layout: str) -> tuple[Tensor, Tensor]:
    """Return the caches with their dimensions in memory order, as FlashInfer expects them."""
    caches = (inputs.key_cache, inputs.value_cache)
    if layout == "HND":
        return caches[0].transpose(1, 2), caches[1].transpose(1, 2)
    return caches


def page_lists(inputs: PagedInputs, table: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """Return FlashInfer's block table: row offsets, block ids, and tokens in each last block."""
    contexts = inputs.context_lens
    num_blocks = (contexts + block_size - 1) // block_size
    starts = F.pad(num_blocks.cumsum(0), (1, 0)).int()
    is_used = torch.arange(table.shape[1], device=table.device) < num_blocks[:, None]
    return starts, table[is_used].int(), (contexts - 1) % block_size + 1
