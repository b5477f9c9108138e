"""The layers of common models, and the kernels that they launch in bf16.

`kernels.precompile` launches them for GPUs that are not there. The sizes are those of one process;
tests compare the launches with those of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.arguments import EXPANDED_DIMS, LATENT_DIMS
from kernels.attention.paged_decode import paged_decode
from kernels.attention.paged_prefill import paged_prefill
from kernels.attention.prefill_splits import prefill_work
from kernels.attention.work_list import make_work_list
from kernels.cache.cache_write import write_kv
from kernels.cache.rotary_cache_write import rotary_write_kv
from kernels.elementwise.gated_activation import gated_activation
from kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from kernels.elementwise.rotary import rotary
from kernels.state.batch import StateBatch
from kernels.state.conv_rows import conv_rows
from kernels.state.rows import STATE_DTYPES
from kernels.state.scan import scan
from kernels.state.state_tiles import state_tiles

BLOCK_SIZE = 16
"""The default of `option.block_size`."""
TOKENS = 3
EPS = 1e-6
ROPE_DIM = 64
"""Rotated dims of a latent."""
TAPS = 4
"""Of the convolutions of delta nets and Mamba-2."""


class Layers(Protocol):
    """Layers of one kind."""

    def launch(self) -> None:
        """Launch all their kernels but products, through the wrappers, on CPU tensors."""
        ...


class Norm(NamedTuple):
    """The options of `rms_norm`; the defaults are Llama's."""

    offset: float = 0.0
    rounds_first: bool = True

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight, EPS, **self._asdict())


LLAMA_NORM, QWEN_NORM, GEMMA_NORM = Norm(), Norm(1.0, False), Norm(0.0, False)


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers with attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    normed: Literal["", "qk", "qkv"] = ""
    """Heads that are normalized: of queries and keys (Qwen 3), or of values, too (Gemma 4)."""
    norm: Norm = LLAMA_NORM
    rotary_dim: int | None = None
    """Rotated dims of a head; None: all."""
    window: int | None = None
    activation: str = "silu"
    has_shared: bool = False
    """Whether some of the layers read the K and V of others."""
    input_width: int = 0
    """Numbers that each layer gets of a token besides hidden states."""

    def launch(self) -> None:
        query, key, value = self._projected()
        keys, values = (_cache(self.num_kv_heads, self.head_dim) for _ in range(2))
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        angles = _angles(rotary_dim)
        if self.has_shared:
            rotary(query, query[:, :0], *angles, rotary_dim)
        if rotary_dim:
            rotary_write_kv(query, key, value, *angles, rotary_dim, keys, values, _slots())
        else:
            write_kv(key, value, keys, values, _slots())
        _attend(query, keys, values, self.window)
        _launch_elementwise(self.hidden_size, self.norm, self.activation)
        if self.input_width:
            inputs = _rows(2, self.input_width)
            self.norm(inputs, inputs[0, 0])

    def _projected(self) -> tuple[Tensor, ...]:
        """Return queries, keys and values as slices of one merged projection, or of its norm."""
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        rows = _rows(sum(counts), self.head_dim)
        if self.normed == "qkv":
            return _norm_heads(self.norm, rows).split(counts, 1)
        query, key, value = rows.split(counts, 1)
        if self.normed == "qk":
            both = rows[:, : sum(counts[:2])]
            query, key = _norm_heads(self.norm, both).split(counts[:2], 1)
        return query, key, value


@dataclass(frozen=True, slots=True)
class FoldedShape:
    """Gemma 4's layers whose K and V are norms of one projection.

    A quarter of K's dims rotates; the cache has them once more, unrotated, for V.
    """

    num_heads: int
    num_kv_heads: int
    hidden_size: int
    head_dim: int = 512

    def launch(self) -> None:
        counts, dim = (self.num_heads, self.num_kv_heads), self.head_dim
        rotated = dim // 4
        rows = _rows(sum(counts), dim)
        query, key = _norm_heads(GEMMA_NORM, rows).split(counts, 1)
        value = GEMMA_NORM(rows[:, self.num_heads :], rows[0, 0])[..., -rotated:]
        rotary(query[..., -rotated:], key[..., -rotated:], *_angles(rotated), rotated)
        cache = _cache(self.num_kv_heads, dim + rotated)
        write_kv(key, value, cache[..., rotated:], cache[..., :rotated], _slots())
        _attend(query, cache[..., rotated:], cache[..., :dim])
        _launch_elementwise(self.hidden_size, GEMMA_NORM, "gelu_tanh")


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Layers with latent attention."""

    num_heads: int
    hidden_size: int
    query_rank: int | None = None
    """Outputs of the first projection of queries; None: there is only one."""
    dims: tuple[int, int] = LATENT_DIMS[0]
    expanded: tuple[int, int] = EXPANDED_DIMS[0]
    """Dims of K and V of a head."""

    def launch(self) -> None:
        key_dim, rank = self.dims
        merged = _rows((self.query_rank or self.num_heads * key_dim) + key_dim)
        query_row, row = merged[:, :-key_dim], merged[:, -key_dim:-ROPE_DIM]
        for part in (row,) if self.query_rank is None else (query_row, row):
            LLAMA_NORM(part, part[0].contiguous())
        query, key, keys = _rows(self.num_heads, key_dim), _rows(1, key_dim), _cache(1, key_dim)
        rotary(query[..., rank:], key[..., rank:], *_angles(ROPE_DIM), ROPE_DIM)
        write_kv(*key.tensor_split([rank], -1), *keys.tensor_split([rank], -1), _slots())
        _attend(query, keys, keys[..., :rank])
        key_dim = self.expanded[0]
        rows = _cache(self.num_heads, sum(self.expanded))
        _attend_prompts(_rows(self.num_heads, key_dim), *rows.tensor_split([key_dim], -1))
        _launch_elementwise(self.hidden_size, LLAMA_NORM, "silu")


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Gated delta nets."""

    num_key_heads: int
    num_heads: int
    key_dim: int = 128
    value_dim: int = 128

    def launch(self) -> None:
        widths = [self.num_key_heads * self.key_dim] * 2 + [self.num_heads * self.value_dim]
        mixed = _convolve(sum(widths), has_bias=False)
        dims = (self.key_dim, self.key_dim, self.value_dim)
        tokens = [
            part.unflatten(-1, (-1, dim))
            for part, dim in zip(mixed.split(widths, 1), dims, strict=True)
        ]
        out = _advance(tokens, is_delta=True, skip=None)
        LLAMA_NORM(out, out[0, 0].contiguous())
        gated_activation(torch.cat([out, out], -1).flatten(0, 1), "silu")


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Mamba-2, whose queries and keys are those of a group of heads."""

    num_heads: int
    head_dim: int = 64
    state_size: int = 128
    num_groups: int = 1

    def launch(self) -> None:
        widths = [self.num_heads * self.head_dim] + [self.num_groups * self.state_size] * 2
        value, key, query = _convolve(sum(widths), has_bias=True).split(widths, 1)
        query, key = (part.unflatten(-1, (-1, self.state_size)) for part in (query, key))
        tokens = [query, key, value.unflatten(-1, (-1, self.head_dim))]
        out = _advance(tokens, is_delta=False, skip=torch.empty(self.num_heads)).flatten(1)
        gated = gated_activation(torch.cat([out, out], -1), "silu")
        if self.num_groups > 1:
            gated = gated[:, : widths[0] // self.num_groups].contiguous()
        LLAMA_NORM(gated, gated[0])


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Mamba, of which Falcon's norms what is selected: dt, B and C."""

    num_channels: int
    hidden_size: int
    rank: int
    state_size: int = 16
    is_normed: bool = False

    def launch(self) -> None:
        value = _convolve(self.num_channels, has_bias=True)
        widths = (self.rank, self.state_size, self.state_size)
        parts = _rows(sum(widths)).split(widths, 1)
        if self.is_normed:
            parts = [LLAMA_NORM(part.contiguous(), part[0].contiguous()) for part in parts]
        _, key, query = parts
        scale, out = torch.empty(self.state_size, self.num_channels), value
        for dtype in STATE_DTYPES:
            states = torch.empty(2, *scale.shape, dtype=dtype)
            rate = torch.empty(TOKENS, self.num_channels)
            out = scan(query, key, value, rate, scale, scale[0], states, _state_batch())
        gated_activation(torch.cat([out, out], -1), "silu")
        hidden = _rows(self.hidden_size)
        LLAMA_NORM(hidden, hidden[0])
        add_rms_norm(hidden, hidden, hidden[0], EPS, **LLAMA_NORM._asdict())


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """Short convolutions with a gate before and one after (LFM2)."""

    width: int
    taps: int = 3

    def launch(self) -> None:
        before, after, rows = _rows(3 * self.width).chunk(3, 1)
        weight = torch.empty(self.taps, self.width, dtype=torch.bfloat16)
        tails = torch.empty(2, self.taps - 1, self.width, dtype=torch.bfloat16)
        conv_rows(rows, weight, None, tails, _state_batch(), before=before, after=after)


def _qwen_state(num_heads: int, num_kv_heads: int, hidden_size: int) -> Shape:
    """Return the layers with attention of Qwen 3.5 and Qwen3-Next."""
    return Shape(
        num_heads, num_kv_heads, 256, hidden_size, normed="qk", norm=QWEN_NORM, rotary_dim=64
    )


def _gemma4(
    num_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int,
    *, window: int | None = None, input_width: int = 0,
) -> Shape:
    """Models of which layers have inputs share K and V between layers, too."""
    return Shape(
        num_heads, num_kv_heads, head_dim, hidden_size, "qkv", GEMMA_NORM, window=window,
        activation="gelu_tanh", has_shared=input_width > 0, input_width=input_width,
    )


# If only some models of a shape normalize their heads, `normed` is "qk": it only adds kernels.
SHAPES: tuple[Layers, ...] = (
    Shape(14, 2, 64, 896),  # Qwen 2.5 0.5B
    Shape(12, 2, 128, 1536),  # Qwen 2.5 1.5B
    Shape(28, 4, 128, 3584),  # Qwen 2.5 7B
    Shape(16, 8, 128, 1024, "qk"),  # Qwen 3 0.6B
    Shape(32, 8, 128, 2560, "qk"),  # Qwen 3 4B
    Shape(32, 8, 64, 2048, "qk"),  # Llama 3.2 1B, LFM2 1.2B
    Shape(24, 8, 128, 3072),  # Llama 3.2 3B
    Shape(32, 8, 128, 4096, "qk"),  # Llama 3.1 8B, Mistral 7B, Qwen 3 8B
    Shape(40, 8, 128, 5120, "qk"),  # Qwen 2.5 and Qwen 3 14B
    LatentShape(16, 2048),  # DeepSeek V2 Lite
    LatentShape(16, 7168, 1536),  # DeepSeek V3 and R1 on eight GPUs
    LatentShape(20, 2048, 768, expanded=(256, 256)),  # GLM-4.7-Flash
    LatentShape(32, 4096, 1024, LATENT_DIMS[1], (128, 128)),  # Mistral Small 4
    _gemma4(8, 1, 256, 1536, window=512, input_width=256),  # Gemma 4 E2B
    _gemma4(8, 1, 512, 1536, input_width=256),
    _gemma4(8, 2, 256, 2560, window=512, input_width=256),  # Gemma 4 E4B
    _gemma4(8, 2, 512, 2560, input_width=256),
    _gemma4(32, 16, 256, 5376, window=1024),  # Gemma 4 31B
    FoldedShape(32, 4, 5376),
    DeltaShape(16, 32),  # Qwen 3.5 4B and 9B, Qwen3-Next
    _qwen_state(16, 4, 2560),  # Qwen 3.5 4B
    _qwen_state(16, 4, 4096),  # Qwen 3.5 9B
    _qwen_state(16, 2, 2048),  # Qwen3-Next
    MambaShape(128),  # Granite 4 H Small, Bamba 9B
    replace(Shape(32, 8, 128, 4096), rotary_dim=64),  # Bamba 9B
    replace(Shape(32, 8, 128, 4096), rotary_dim=0),  # Granite 4 H Small
    ConvolutionShape(2048),  # LFM2 1.2B
    ScanShape(5120, 2560, 160),  # Mamba 2.8B
    ScanShape(8192, 4096, 256, is_normed=True),  # Falcon Mamba 7B
)


def _attend(query: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> None:
    lens, tables = torch.ones(TOKENS, dtype=torch.int32), _tables()
    work = make_work_list(lens, 4, window=window)
    paged_decode(query, keys, values, tables, lens, work=work, scale=1.0, window=window)
    _attend_prompts(query, keys, values, window, num_splits=4)


def _attend_prompts(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None = None, num_splits: int = 0
) -> None:
    lens, starts = torch.ones(TOKENS, dtype=torch.int32), torch.arange(TOKENS + 1).int()
    work = prefill_work(query, keys, starts, lens, num_splits, window=window)
    paged = (query, keys, values, _tables(), starts, lens)
    paged_prefill(*paged, work=work, scale=1.0, window=window)


def _launch_elementwise(hidden_size: int, norm: Norm, activation: str) -> None:
    hidden = _rows(hidden_size)
    norm(hidden, hidden[0])
    add_rms_norm(hidden, hidden, hidden[0], EPS, **norm._asdict())
    gated_activation(_rows(2 * hidden_size), activation)


def _convolve(width: int, *, has_bias: bool) -> Tensor:
    """Return rows [TOKENS, width] after a convolution, as the recurrence gets them."""
    rows = _rows(2 * width)[:, :width]
    weight = torch.empty(TAPS, width, dtype=torch.bfloat16)
    tails = torch.empty(2, TAPS - 1, width, dtype=torch.bfloat16)
    bias = weight[0] if has_bias else None
    return conv_rows(rows, weight, bias, tails, _state_batch(), silu=True)


def _advance(tokens: Sequence[Tensor], *, is_delta: bool, skip: Tensor | None) -> Tensor:
    """Advance states of every type of `option.state_dtype`. Return the outputs of one of them."""
    query, _, value = tokens
    gates, shape = torch.empty(TOKENS, value.shape[1]), (query.shape[2], value.shape[2])
    batch, out = _state_batch(), value
    for dtype in STATE_DTYPES:
        states = torch.empty(2, value.shape[1], *shape, dtype=dtype)
        out = state_tiles(*tokens, gates, gates, states, batch, is_delta=is_delta, skip=skip)
    return out


def _state_batch() -> StateBatch:
    """Return a decode and a prompt of two tokens."""
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    return StateBatch(starts, torch.arange(2), torch.zeros(TOKENS).long(), ((0, 1), (1, 3)), 1)


def _rows(*shape: int) -> Tensor:
    return torch.empty(TOKENS, *shape, dtype=torch.bfloat16)


def _cache(num_kv_heads: int, head_dim: int) -> Tensor:
    return torch.empty(2, BLOCK_SIZE, num_kv_heads, head_dim, dtype=torch.bfloat16)


def _norm_heads(norm: Norm, rows: Tensor) -> Tensor:
    """Norm rows [TOKENS, heads, dim] with a weight for each head."""
    return norm(rows, rows[0].contiguous())


def _angles(rotary_dim: int) -> Tensor:
    """Return cos and sin."""
    return torch.empty(2, TOKENS, rotary_dim // 2, dtype=torch.bfloat16)


def _tables() -> Tensor:
    return torch.zeros(TOKENS, 4, dtype=torch.int32)


def _slots() -> Tensor:
    return torch.zeros(TOKENS, dtype=torch.int64)
