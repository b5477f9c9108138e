"""Decoder layers and their parts (norms, attention, the gated MLP) as lists of kernels.

Called one by one, each kernel's arguments are checked and gathered anew for each call, which takes
Python longer than a step of few tokens takes to compute. Here what stays the same is gathered once;
`bind` fills in the addresses of what is new, and then all kernels run in one call. Addresses are of
dense rows, of one type within a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.batch import PagedBatch
from kernels.cpu.attention import MAX_DIM, Attention, check_ids
from kernels.cpu.cache import Write
from kernels.cpu.calls import Calls, Kernel
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
        self._at_once = panels[0, 0, 0].numel()
        self.depth = panels.shape[1] * self._at_once
        """Numbers of a row."""
        self._panels, self._bias = panels, bias  # whose memory the arguments point to
        self._arguments = Linear(
            panels=panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            num_columns=num_columns,
            depth=panels.shape[1],
        )
        self.kernel = Kernel(product_function(panels), self._arguments)

    def bind(
        self,
        rows: int,
        num_rows: int,
        out: int,
        residual: int | None = None,
        stride: int | None = None,
    ) -> None:
        """rows, out: of the type that `linear` takes and returns. residual: what the product,
        rounded to that type, is added to; it may be `out`. stride: numbers between rows."""
        arguments = self._arguments
        arguments.residual = residual
        arguments.row_stride = (stride or self.depth) // self._at_once
        arguments.rows, arguments.num_rows, arguments.out = rows, num_rows, out


class PreparedNorm:
    """As `kernels.torch_elementwise.rms_norm`, of rows of one width."""

    def __init__(
        self, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
    ) -> None:
        """Raises UnpreparedError for a width that the C++ does not compute."""
        _check(weight.shape[0], weight.dtype)
        self.dtype = weight.dtype
        self.width = weight.shape[0]
        self._weight = weight  # whose memory the arguments point to
        self._arguments = Norm(
            weight=weight.data_ptr(),
            num_heads=1,
            width=self.width,
            eps=eps,
            offset=offset,
            rounds_first=rounds_first,
        )
        self.kernel = Kernel(function("rms_norm", weight.dtype), self._arguments)

    def bind(
        self,
        rows: int,
        num_tokens: int,
        out: int,
        num_heads: int = 1,
        strides: tuple[int, int] | None = None,
        residual: int | None = None,
    ) -> None:
        """Of heads side by side; strides: of tokens and heads, in numbers. residual: dense, what
        the result is added to; it may be `out`."""
        arguments = self._arguments
        arguments.rows, arguments.out, arguments.residual = rows, out, residual
        arguments.strides[:] = strides or (self.width, 0)
        arguments.num_tokens, arguments.num_heads = num_tokens, num_heads


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
        self.scratch_width = gate_up.num_columns
        """Numbers that a token needs on the way."""
        self._gate_up, self._down = gate_up, down
        stride = self.scratch_width
        self._arguments = Activation(
            width=down.depth, stride=stride, out_stride=stride, is_gelu=activation == "gelu_tanh"
        )
        activate = Kernel(function("gated_activation", gate_up.dtype), self._arguments)
        self.kernels = [gate_up.kernel, activate, down.kernel]

    def bind(
        self, hidden: int, num_tokens: int, out: int, scratch: int, residual: int | None = None
    ) -> None:
        """out: it may be `hidden`. residual: what the result is added to; it may be `out`."""
        arguments = self._arguments
        arguments.gate_up = arguments.out = scratch  # a gate makes room for its product
        arguments.num_tokens = num_tokens
        self._gate_up.bind(hidden, num_tokens, scratch)
        self._down.bind(scratch, num_tokens, out, residual, self.scratch_width)


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's attention is made of; sinks: fp32."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    """0: nothing is rotated."""
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    norms: tuple[PreparedNorm, PreparedNorm] | None = None
    """Of queries and of keys: of each head, or of all heads as one row."""


class AttentionInputs(NamedTuple):
    """What attention takes beside hidden states."""

    angles: tuple[Tensor, Tensor] | None
    """cos, sin: [T, half] or [T, rotary_dim], dense, of one type with hidden states."""
    keys: Tensor
    """The cache, like `values` and `batch` as `kernels.cpu.attention.paged_attention` takes it."""
    values: Tensor
    batch: PagedBatch


class PreparedAttention:
    """A product for q, k and v, norms of heads, rotary embedding, the cache write, attention over
    the cache, and a product of what comes out."""

    def __init__(self, qkv: PreparedProduct, out: PreparedProduct, heads: Heads) -> None:
        """Heads are such as this `computes`."""
        dtype = self.dtype = qkv.dtype
        self.out = out
        self._heads, self._qkv, self._itemsize = heads, qkv, dtype.itemsize
        self._sizes = heads.num_heads * heads.key_dim, heads.num_kv_heads * heads.key_dim
        dims, width = (heads.key_dim, heads.value_dim), qkv.num_columns
        norms = heads.norms or ()
        self.scratch_width = width + (sum(self._sizes) if norms else 0)
        """Numbers that a token needs on the way."""
        strides = [(each, heads.key_dim) for each in (self._sizes if norms else (width, width))]
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
        """All but that of `out`, which `bind` leaves alone."""

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

    def bind(
        self, hidden: int, num_tokens: int, inputs: AttentionInputs, attended: int, scratch: int
    ) -> None:
        """attended: where [T, heads * value_dim] goes, of which `out` makes hidden states."""
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
            to = normed, normed + num_tokens * self._sizes[0] * self._itemsize
            for norm, rows, size, out in zip(
                heads.norms, (query, key), self._sizes, to, strict=True
            ):
                strides = self._qkv.num_columns, norm.width
                norm.bind(rows, num_tokens, out, size // norm.width, strides)
            query, key = to
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
    """Addresses of what the parts of a layer leave for each other."""

    normed: int
    attended: int
    scratch: int


LayerNorms = tuple[
    PreparedNorm | None, PreparedNorm | None, PreparedNorm | None, PreparedNorm | None
]
"""Before attention, after it, before the MLP, after it."""


class PreparedLayer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`, with the norms that there are."""

    def __init__(self, norms: LayerNorms, attention: PreparedAttention, mlp: PreparedMLP) -> None:
        """Raises UnpreparedError for parts of several types."""
        self.dtype = attention.dtype
        if any(part.dtype != self.dtype for part in (*norms, mlp) if part is not None):
            raise UnpreparedError("its parts are of several types")
        self._norms, self._attention, self._mlp = norms, attention, mlp
        self.attended_width = attention.out.depth
        self.scratch_width = max(attention.scratch_width, mlp.scratch_width)
        before, after, before_mlp, after_mlp = ([norm.kernel] if norm else [] for norm in norms)
        self.attending = [*before, *attention.kernels]
        """The kernels that tokens need of each other."""
        self.finishing = [
            attention.out.kernel, *after, *before_mlp, *mlp.kernels, *after_mlp
        ]  # fmt: skip
        """The others, after them."""

    def bind_attending(
        self, hidden: int, num_tokens: int, inputs: AttentionInputs, memory: Memory
    ) -> None:
        given, before = hidden, self._norms[0]
        if before is not None:
            given = memory.normed
            before.bind(hidden, num_tokens, given)
        self._attention.bind(given, num_tokens, inputs, memory.attended, memory.scratch)

    def bind_finishing(self, hidden: int, num_tokens: int, out: int, memory: Memory) -> None:
        """out: it may be `hidden`, what the layer was given of these tokens."""
        _, after, before_mlp, after_mlp = self._norms
        product, given = self._attention.out, out
        if after is None:
            product.bind(memory.attended, num_tokens, out, residual=hidden)
        else:
            product.bind(memory.attended, num_tokens, memory.normed)
            after.bind(memory.normed, num_tokens, out, residual=hidden)
        if before_mlp is not None:
            given = memory.normed
            before_mlp.bind(out, num_tokens, given)
        if after_mlp is None:
            self._mlp.bind(given, num_tokens, out, memory.scratch, residual=out)
        else:
            self._mlp.bind(given, num_tokens, memory.normed, memory.scratch)
            after_mlp.bind(memory.normed, num_tokens, out, residual=out)


class PreparedLayers:
    """Layers of which each takes what the one before it gives, all in one call."""

    def __init__(self, layers: Sequence[PreparedLayer]) -> None:
        """Raises UnpreparedError for layers of several types."""
        self.layers, self.dtype = layers, layers[0].dtype
        if any(layer.dtype != self.dtype for layer in layers):
            raise UnpreparedError("layers are of several types")
        self._attended_width = max(layer.attended_width for layer in layers)
        self._scratch_width = max(layer.scratch_width for layer in layers)
        kernels = [kernel for layer in layers for kernel in (*layer.attending, *layer.finishing)]
        finishing = layers[-1].finishing
        self._run, self._finish = Calls(kernels), Calls(finishing)
        self._attend = Calls(kernels[: -len(finishing)])

    def __call__(
        self, hidden: Tensor, inputs: Sequence[AttentionInputs], rows: Tensor | None = None
    ) -> Tensor:
        """hidden: [T, width], dense. inputs: of each layer. Returns the same shape; or [R, width]
        of the tokens `rows` [R] int64, at most T, which are all that the last layer finishes."""
        num_tokens, last = hidden.shape[0], self.layers[-1]
        out, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        attended = hidden.new_empty(num_tokens * self._attended_width)
        scratch = hidden.new_empty(num_tokens * self._scratch_width)
        memory = Memory(normed.data_ptr(), attended.data_ptr(), scratch.data_ptr())
        given = hidden
        for layer, layer_inputs in zip(self.layers, inputs, strict=True):
            source, target = given.data_ptr(), out.data_ptr()
            layer.bind_attending(source, num_tokens, layer_inputs, memory)
            if layer is not last:
                layer.bind_finishing(source, num_tokens, target, memory)
                given = out
        if rows is None:
            last.bind_finishing(given.data_ptr(), num_tokens, out.data_ptr(), memory)
            self._run()
            return out
        self._attend()
        kept = given[rows]
        width = last.attended_width
        attended = attended[: num_tokens * width].view(num_tokens, width)[rows]
        memory = memory._replace(attended=attended.data_ptr())
        last.bind_finishing(kept.data_ptr(), len(rows), kept.data_ptr(), memory)
        self._finish()
        return kept


def _check(width: int, dtype: torch.dtype) -> None:
    if dtype not in SUFFIXES or width % WIDTH:
        raise UnpreparedError(f"a width of {width} in {dtype} is not computed")
