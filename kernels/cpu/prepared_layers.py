"""Whole decoder layers as lists of kernels: attention and its settings, one layer, all layers.

See `kernels.cpu.prepared` for the parts and for why the calls are collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch
from kernels.cpu.attention import MAX_DIM, Attention, check_ids
from kernels.cpu.cache import Write
from kernels.cpu.calls import Calls, Kernel
from kernels.cpu.elementwise import Rotary
from kernels.cpu.prepared import NoKernelError, PreparedLinear, PreparedMLP, PreparedNorm
from kernels.cpu.shared_library import WIDTH, function


@dataclass(frozen=True, slots=True)
class Heads:
    """The settings of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    """0: no rotary embedding."""
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """[num_heads] fp32."""
    norms: tuple[PreparedNorm, PreparedNorm] | None = None
    """Norms of queries and of keys. Each normalizes every head by itself, or all heads as one
    row."""


class AttentionInputs(NamedTuple):
    """The inputs of a layer's attention other than hidden states."""

    angles: tuple[Tensor, Tensor] | None
    """cos and sin, [T, half] or [T, rotary_dim], dense, in the dtype of hidden states."""
    keys: Tensor
    """The KV cache. `keys`, `values` and `batch` are key_cache, value_cache and batch of
    `kernels.cpu.attention.paged_attention`."""
    values: Tensor
    batch: PagedBatch


class PreparedAttention:
    """Self-attention: the QKV projection, q/k norms, rotary embedding, the cache write, attention
    over the cache, the output projection."""

    def __init__(self, qkv: PreparedLinear, out: PreparedLinear, heads: Heads) -> None:
        """The arguments must pass `supports`."""
        dtype = self.dtype = qkv.dtype
        self.out = out
        self._heads, self._qkv, self._itemsize = heads, qkv, dtype.itemsize
        self._sizes = heads.num_heads * heads.key_dim, heads.num_kv_heads * heads.key_dim
        dims, width = (heads.key_dim, heads.value_dim), qkv.num_columns
        norms = heads.norms or ()
        self.scratch_width = width + (sum(self._sizes) if norms else 0)
        """Scratch elements per token."""
        row_widths = self._sizes if norms else (width, width)
        strides = [(row_width, heads.key_dim) for row_width in row_widths]
        self._rotary = Rotary(
            num_heads=(heads.num_heads, heads.num_kv_heads),
            half=heads.rotary_dim // 2,
            strides=tuple(strides),
        )
        self._write = Write(
            num_heads=heads.num_kv_heads, dims=dims, strides=(strides[1], (width, dims[1]))
        )
        self._attention = Attention(
            sinks=None if heads.sinks is None else heads.sinks.data_ptr(),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            key_dim=heads.key_dim,
            value_dim=heads.value_dim,
            query_strides=strides[0],
            window=heads.window or 0,
            scale=heads.scale,
            softcap=heads.softcap or 0.0,
        )
        self._caches: tuple[Tensor, Tensor] | None = None
        self._batch: PagedBatch | None = None
        self.kernels = [
            qkv.kernel,
            *(norm.kernel for norm in norms),
            *([Kernel(function("rotary", dtype), self._rotary)] if heads.rotary_dim else []),
            Kernel(function("write_kv", dtype), self._write),
            Kernel(function("attend", dtype), self._attention),
        ]
        """All kernels except that of the projection `out`, whose addresses `bind` does not set."""

    @staticmethod
    def supports(qkv: PreparedLinear, out: PreparedLinear, heads: Heads) -> bool:
        """Return whether the projections match the heads and the C++ has kernels for them."""
        dims = heads.key_dim, heads.value_dim
        widths = (*dims, heads.rotary_dim // 2)
        num_columns = (heads.num_heads + heads.num_kv_heads) * heads.key_dim
        return (
            qkv.num_columns == num_columns + heads.num_kv_heads * heads.value_dim
            and out.depth == heads.num_heads * heads.value_dim
            and qkv.dtype == out.dtype
            and not any(width % WIDTH for width in widths)
            and max(dims) <= MAX_DIM
            and heads.rotary_dim <= heads.key_dim
        )

    def bind(
        self, hidden: int, num_tokens: int, inputs: AttentionInputs, attended: int, scratch: int
    ) -> None:
        """Set the addresses of a step.

        attended: address for the attention output [T, heads * value_dim], the input of `out`.
        """
        angles, keys, values, batch = inputs
        if self._caches is None or self._caches[0] is not keys or self._caches[1] is not values:
            self._bind_caches(keys, values)
        if self._batch is not batch:
            self._bind_batch(batch)
        heads = self._heads
        self._qkv.bind(hidden, num_tokens, scratch)
        query, key = scratch, scratch + self._sizes[0] * self._itemsize
        value = key + self._sizes[1] * self._itemsize
        if heads.norms is not None:
            normed = scratch + num_tokens * self._qkv.num_columns * self._itemsize
            outs = normed, normed + num_tokens * self._sizes[0] * self._itemsize
            for norm, rows, size, out in zip(
                heads.norms, (query, key), self._sizes, outs, strict=True
            ):
                strides = self._qkv.num_columns, norm.width
                norm.bind(rows, num_tokens, out, size // norm.width, strides)
            query, key = outs
        if angles is not None:
            self._bind_angles(*angles, query, key)
        write, attention = self._write, self._attention
        write.rows[:] = key, value
        write.num_tokens = num_tokens
        attention.query, attention.out = query, attended

    def _bind_angles(self, cos: Tensor, sin: Tensor, query: int, key: int) -> None:
        rotary = self._rotary
        num_tokens, width = cos.shape
        rotary.rows[:] = query, key
        rotary.cos, rotary.sin, rotary.num_tokens = cos.data_ptr(), sin.data_ptr(), num_tokens
        rotary.cos_stride = rotary.sin_stride = width
        rotary.second_half = width - rotary.half

    def _bind_caches(self, keys: Tensor, values: Tensor) -> None:
        self._caches = keys, values
        write, attention = self._write, self._attention
        write.caches[:] = attention.keys, attention.values = keys.data_ptr(), values.data_ptr()
        write.block_size = attention.block_size = keys.shape[1]
        write.cache_strides[:] = keys.stride()[:3], values.stride()[:3]
        attention.key_strides, attention.value_strides = keys.stride()[:3], values.stride()[:3]

    def _bind_batch(self, batch: PagedBatch) -> None:
        check_ids(batch)
        self._batch, attention = batch, self._attention
        self._write.slots = batch.slot_mapping.data_ptr()
        attention.block_tables = batch.block_tables.data_ptr()
        attention.query_starts = batch.query_starts.data_ptr()
        attention.context_lens = batch.context_lens.data_ptr()
        attention.num_sequences = batch.context_lens.shape[0]
        attention.num_decodes = batch.num_decodes
        attention.table_stride = batch.block_tables.stride(0)


class Memory(NamedTuple):
    """Addresses of the buffers that all layers share."""

    normed: int
    """The output of a norm, the input of the next part."""
    attended: int
    """The output of attention, before its output projection."""
    scratch: int
    """Scratch memory within attention or an MLP."""


LayerNorms = tuple[
    PreparedNorm | None, PreparedNorm | None, PreparedNorm | None, PreparedNorm | None
]
"""Norms before and after attention, and before and after the MLP."""


class PreparedLayer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`, where each norm is optional.

    Its kernels form two groups, because the last layer finishes only the rows that need logits.
    """

    def __init__(self, norms: LayerNorms, attention: PreparedAttention, mlp: PreparedMLP) -> None:
        """Raises NoKernelError if the parts differ in dtype."""
        self.dtype = attention.dtype
        if any(part.dtype != self.dtype for part in (*norms, mlp) if part is not None):
            raise NoKernelError("its parts differ in dtype")
        self._norms, self._attention, self._mlp = norms, attention, mlp
        self.attended_width = attention.out.depth
        self.scratch_width = max(attention.scratch_width, mlp.scratch_width)
        before, after, before_mlp, after_mlp = ([norm.kernel] if norm else [] for norm in norms)
        self.attention_kernels = [*before, *attention.kernels]
        """Kernels that compute `Memory.attended` from the layer's input. They need all tokens."""
        self.output_kernels = [
            attention.out.kernel, *after, *before_mlp, *mlp.kernels, *after_mlp
        ]
        """Kernels that compute the layer's output from `Memory.attended`, each token by itself."""

    def bind_attention(
        self, hidden: int, num_tokens: int, inputs: AttentionInputs, memory: Memory
    ) -> None:
        """Set the addresses of `attention_kernels`."""
        source, before = hidden, self._norms[0]
        if before is not None:
            source = memory.normed
            before.bind(hidden, num_tokens, source)
        self._attention.bind(source, num_tokens, inputs, memory.attended, memory.scratch)

    def bind_output(self, hidden: int, num_tokens: int, out: int, memory: Memory) -> None:
        """Set the addresses of `output_kernels`.

        hidden: the layer's input for these tokens. out: may equal `hidden`.
        """
        _, after, before_mlp, after_mlp = self._norms
        projection, source = self._attention.out, out
        if after is None:
            projection.bind(memory.attended, num_tokens, out, residual=hidden)
        else:
            projection.bind(memory.attended, num_tokens, memory.normed)
            after.bind(memory.normed, num_tokens, out, residual=hidden)
        if before_mlp is not None:
            source = memory.normed
            before_mlp.bind(out, num_tokens, source)
        if after_mlp is None:
            self._mlp.bind(source, num_tokens, out, memory.scratch, residual=out)
        else:
            self._mlp.bind(source, num_tokens, memory.normed, memory.scratch)
            after_mlp.bind(memory.normed, num_tokens, out, residual=out)


class PreparedLayers:
    """A stack of layers that runs in one call."""

    def __init__(self, layers: Sequence[PreparedLayer]) -> None:
        """Raises NoKernelError if the layers differ in dtype."""
        self.layers, self.dtype = layers, layers[0].dtype
        if any(layer.dtype != self.dtype for layer in layers):
            raise NoKernelError("layers differ in dtype")
        self._attended_width = max(layer.attended_width for layer in layers)
        self._scratch_width = max(layer.scratch_width for layer in layers)
        kernels = [
            kernel
            for layer in layers
            for kernel in (*layer.attention_kernels, *layer.output_kernels)
        ]
        last_kernels = layers[-1].output_kernels
        self._run_all = Calls(kernels)
        self._run_to_last_attention = Calls(kernels[: -len(last_kernels)])
        self._run_last_output = Calls(last_kernels)

    def __call__(
        self, hidden: Tensor, inputs: Sequence[AttentionInputs], rows: Tensor | None = None
    ) -> Tensor:
        """Return the last layer's output [T, width], or [R, width] for only the tokens at `rows`.

        hidden: [T, width], dense. inputs: one for each layer. rows: [R] int64, with R <= T.
        """
        num_tokens, last = hidden.shape[0], self.layers[-1]
        out, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        attended = hidden.new_empty(num_tokens * self._attended_width)
        scratch = hidden.new_empty(num_tokens * self._scratch_width)
        memory = Memory(normed.data_ptr(), attended.data_ptr(), scratch.data_ptr())
        # The first layer reads `hidden`, which stays intact; the others update `out` in place.
        layer_input = hidden
        for layer, layer_inputs in zip(self.layers, inputs, strict=True):
            source, target = layer_input.data_ptr(), out.data_ptr()
            layer.bind_attention(source, num_tokens, layer_inputs, memory)
            if layer is not last:
                layer.bind_output(source, num_tokens, target, memory)
                layer_input = out
        if rows is None:
            last.bind_output(layer_input.data_ptr(), num_tokens, out.data_ptr(), memory)
            self._run_all()
            return out
        self._run_to_last_attention()
        kept = layer_input[rows]
        width = last.attended_width
        attended = attended[: num_tokens * width].view(num_tokens, width)[rows]
        memory = memory._replace(attended=attended.data_ptr())
        last.bind_output(kept.data_ptr(), len(rows), kept.data_ptr(), memory)
        self._run_last_output()
        return kept
