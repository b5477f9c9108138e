"""A decoder layer and its parts (norms, attention, the gated MLP) as kernels called one by one.

Between the modules and views of a model's own code a kernel's arguments are checked and gathered
anew for each call, which takes Python longer than a step of few tokens takes to compute. Here
what stays the same is gathered once, and a call fills in the addresses of what is new.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.batch import PagedBatch
from kernels.cpu.attention import MAX_DIM, Attention, check_ids
from kernels.cpu.cache import Write
from kernels.cpu.elementwise import Activation, Norm, Rotary
from kernels.cpu.library import SUFFIXES, WIDTH, function
from kernels.cpu.linear import Linear, product_function


class UnpreparedError(Exception):
    """What is asked for is not computed here; the message is the reason."""


class PreparedProduct:
    """Of rows with weights in panels, as `kernels.cpu.linear.linear`."""

    def __init__(self, panels: Tensor, num_columns: int, bias: Tensor | None) -> None:
        """bias: fp32 [num_columns], dense."""
        self.num_columns = num_columns
        self.dtype = panels.dtype if panels.dim() == 4 else torch.float32
        """Of rows and results."""
        self.depth = panels.shape[1] * panels[0, 0, 0].numel()
        """Numbers of a row."""
        self._panels, self._bias = panels, bias
        depth = panels.shape[1]  # of what is multiplied at once
        self._arguments = Linear(
            bias=None if bias is None else bias.data_ptr(),
            num_columns=num_columns,
            depth=depth,
            row_stride=depth,
        )
        self._reference = ctypes.byref(self._arguments)
        self._function = product_function(panels)

    def __call__(self, rows: int, num_rows: int, out: int, residual: int | None = None) -> None:
        """rows, out, residual: addresses; all are dense, and of the type that `linear` takes and
        returns. residual: what the product, rounded to that type, is added to."""
        arguments = self._arguments
        arguments.residual = residual
        arguments.panels = self._panels.data_ptr()  # which moves when a model is cast
        arguments.rows, arguments.num_rows, arguments.out = rows, num_rows, out
        self._function(self._reference)


class PreparedNorm:
    """As `kernels.torch_elementwise.rms_norm`, of rows of one width."""

    def __init__(
        self, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
    ) -> None:
        """Raises UnpreparedError for a width that the C++ does not compute."""
        _check(weight.shape[0], weight.dtype)
        self.dtype = weight.dtype
        self.width = weight.shape[0]
        self._weight = weight
        self._arguments = Norm(
            num_heads=1, width=self.width, eps=eps, offset=offset, rounds_first=rounds_first
        )
        self._reference = ctypes.byref(self._arguments)
        self._function = function("rms_norm", weight.dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., width], dense."""
        out = torch.empty_like(rows)
        num_rows = rows.numel() // self.width
        self.run(rows.data_ptr(), (self.width, 0), num_rows, 1, out.data_ptr())
        return out

    def run(
        self, rows: int, strides: tuple[int, int], num_tokens: int, num_heads: int, out: int
    ) -> None:
        """Of heads side by side; strides: of tokens and heads, in numbers; rows, out: addresses."""
        arguments = self._arguments
        arguments.rows, arguments.out, arguments.strides[:] = rows, out, strides
        arguments.num_tokens, arguments.num_heads = num_tokens, num_heads
        arguments.weight = self._weight.data_ptr()  # which moves when a model is cast
        self._function(self._reference)


class PreparedMLP:
    """A product for gates and ups, the activation of one times the other, and a product down."""

    def __init__(
        self,
        gate_up: PreparedProduct,
        down: PreparedProduct,
        activation: Literal["silu", "gelu_tanh"],
    ) -> None:
        """Raises UnpreparedError for a width that the C++ does not compute."""
        _check(gate_up.num_columns // 2, gate_up.dtype)
        if gate_up.num_columns != 2 * down.depth or gate_up.dtype != down.dtype:
            raise UnpreparedError("its products do not fit together")
        self.dtype = gate_up.dtype
        self._gate_up, self._down, self._width = gate_up, down, gate_up.num_columns // 2
        self._arguments = Activation(
            width=self._width, stride=gate_up.num_columns, is_gelu=activation == "gelu_tanh"
        )
        self._reference = ctypes.byref(self._arguments)
        self._activate = function("gated_activation", gate_up.dtype)

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[1, T, hidden], dense, like the residual that it is added to."""
        num_tokens, arguments = hidden.shape[1], self._arguments
        gates = hidden.new_empty(num_tokens, 2 * self._width)
        product, out = hidden.new_empty(num_tokens, self._width), torch.empty_like(hidden)
        arguments.gate_up, arguments.out = gates.data_ptr(), product.data_ptr()
        arguments.num_tokens = num_tokens
        self._gate_up(hidden.data_ptr(), num_tokens, arguments.gate_up)
        self._activate(self._reference)
        self._down(arguments.out, num_tokens, out.data_ptr(), _address(residual))
        return out


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's attention is made of; sinks: fp32."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    norms: tuple[PreparedNorm, PreparedNorm] | None = None
    """Of queries and of keys."""


class PreparedAttention:
    """A product for q, k and v, norms of heads, rotary embedding, the cache write, attention over
    the cache, and a product of what comes out."""

    def __init__(self, qkv: PreparedProduct, out: PreparedProduct, heads: Heads) -> None:
        """Heads are such as this `computes`."""
        dtype = self.dtype = qkv.dtype
        self._heads, self._qkv, self._out, self._itemsize = heads, qkv, out, dtype.itemsize
        self._sizes = heads.num_heads * heads.key_dim, heads.num_kv_heads * heads.key_dim
        dims, width = (heads.key_dim, heads.value_dim), qkv.num_columns
        widths = (width, width) if heads.norms is None else self._sizes
        strides = [(each, heads.key_dim) for each in widths]
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
        self._rotate = function("rotary", dtype)
        self._write_kv = function("write_kv", dtype)
        self._attend = function("attend", dtype)
        self._caches: tuple[Tensor, Tensor] | None = None
        self._batch: PagedBatch | None = None

    @staticmethod
    def computes(qkv: PreparedProduct, out: PreparedProduct, heads: Heads) -> bool:
        """Whether the products fit the heads, and the C++ has kernels for those."""
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

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
    ) -> Tensor:
        """hidden [1, T, hidden], cos and sin [1, T, width], all dense and of one type; keys,
        values and batch as `kernels.cpu.attention.paged_attention` takes them."""
        return self.project(self.attend(hidden, cos, sin, keys, values, batch))

    def attend(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
    ) -> Tensor:
        """All but the last product: [T, heads * value_dim]."""
        if self._caches is None or self._caches[0] is not keys or self._caches[1] is not values:
            self._bind_caches(keys, values)
        if self._batch is not batch:
            self._bind_batch(batch)
        heads, num_tokens = self._heads, hidden.shape[1]
        qkv = hidden.new_empty(num_tokens, self._qkv.num_columns)
        attended = hidden.new_empty(num_tokens, heads.num_heads * heads.value_dim)
        query = qkv.data_ptr()
        self._qkv(hidden.data_ptr(), num_tokens, query)
        key = query + self._sizes[0] * self._itemsize
        value = key + self._sizes[1] * self._itemsize
        if heads.norms is not None:
            normed = [hidden.new_empty(num_tokens, size) for size in self._sizes]
            strides = self._qkv.num_columns, heads.key_dim
            numbers = heads.num_heads, heads.num_kv_heads
            to = [each.data_ptr() for each in normed]
            for norm, rows, number, out_rows in zip(
                heads.norms, (query, key), numbers, to, strict=True
            ):
                norm.run(rows, strides, num_tokens, number, out_rows)
            query, key = to
        rotary, width = self._rotary, cos.shape[-1]
        rotary.rows[:] = query, key
        rotary.cos, rotary.sin, rotary.num_tokens = cos.data_ptr(), sin.data_ptr(), num_tokens
        rotary.cos_stride = rotary.sin_stride = width
        rotary.second_half = width - rotary.half
        self._rotate(ctypes.byref(rotary))
        write = self._write
        write.rows[:] = key, value
        write.num_tokens = num_tokens
        self._write_kv(ctypes.byref(write))
        attention = self._attention
        attention.query, attention.out = query, attended.data_ptr()
        self._attend(ctypes.byref(attention))
        return attended

    def project(self, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        """The last product, [1, T, hidden], added to a dense residual if there is one."""
        num_tokens = len(attended)
        out = attended.new_empty(1, num_tokens, self._out.num_columns)
        self._out(attended.data_ptr(), num_tokens, out.data_ptr(), _address(residual))
        return out

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


class PreparedLayer:
    """Attention of what is normed, added to what came in, and the MLP of that, likewise."""

    def __init__(
        self,
        norms: tuple[PreparedNorm, PreparedNorm],
        attention: PreparedAttention,
        mlp: PreparedMLP,
    ) -> None:
        """norms: before attention, and before the MLP. Raises UnpreparedError for parts of
        several types."""
        self.dtype = attention.dtype
        if any(each.dtype != self.dtype for each in (*norms, mlp)):
            raise UnpreparedError("its parts are of several types")
        self._norms, self._attention, self._mlp = norms, attention, mlp

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        rows: Tensor | None = None,
    ) -> Tensor:
        """As PreparedAttention takes them. rows: of hidden, int64, those that are wanted of the
        result; the others are 0 then."""
        attended = self._attention.attend(self._norms[0](hidden), cos, sin, keys, values, batch)
        if rows is None or len(rows) >= hidden.shape[1]:
            return self._finish(attended, hidden)
        out = torch.zeros_like(hidden)
        out[:, rows] = self._finish(attended[rows], hidden[:, rows])
        return out

    def _finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        hidden = self._attention.project(attended, hidden)
        return self._mlp(self._norms[1](hidden), hidden)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(width: int, dtype: torch.dtype) -> None:
    if dtype not in SUFFIXES or width % WIDTH:
        raise UnpreparedError(f"a width of {width} in {dtype} is not computed")
