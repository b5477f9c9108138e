"""Norm, gated activation and rotary embedding, each in one pass over memory.

Inputs that the C++ does not support (other dtypes, odd widths, wrong shapes) go to the torch
version. That version raises for mismatched shapes, which would give the C++ wrong addresses.
"""

from __future__ import annotations

import ctypes
from typing import Literal

from torch import Tensor

from kernels.cpu.calls import Kernel, run
from kernels.cpu.shared_library import SUFFIXES, WIDTH, function
from kernels.elementwise import torch_elementwise


class Norm(ctypes.Structure):
    """Mirrors `struct Norm` in elementwise.cpp. The classes below also mirror structs there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "rows", "weight", "residual")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "width")),
        ("strides", ctypes.c_int64 * 2),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        ("rounds_first", ctypes.c_int32),
    )


class Activation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "gate_up")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "width", "stride", "out_stride")),
        ("is_gelu", ctypes.c_int32),
    )


class Rotary(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64 * 2),
        ("half", ctypes.c_int64),
        ("strides", ctypes.c_int64 * 2 * 2),
        *((name, ctypes.c_int64) for name in ("cos_stride", "sin_stride", "second_half")),
    )


def rms_norm(
    rows: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
) -> Tensor:
    """Same as `kernels.elementwise.torch_elementwise.rms_norm`, for rows [T, width] or [T, heads,
    width]."""
    width = rows.shape[-1]
    if not _is_supported(width, rows, weight) or weight.shape != (width,) or rows.ndim > 3:
        return torch_elementwise.rms_norm(
            rows, weight, eps, offset=offset, rounds_first=rounds_first
        )
    out = rows.new_empty(rows.shape)
    heads = rows if rows.ndim == 3 else rows[:, None]
    arguments = Norm(
        out=out.data_ptr(),
        rows=rows.data_ptr(),
        weight=weight.data_ptr(),
        num_tokens=heads.shape[0],
        num_heads=heads.shape[1],
        width=width,
        strides=heads.stride()[:2],
        eps=eps,
        offset=offset,
        rounds_first=rounds_first,
    )
    run(Kernel(function("rms_norm", rows.dtype), arguments), rows.numel())
    return out


def gated_activation(gate_up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """Same as `kernels.elementwise.torch_elementwise.gated_activation`."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not _is_supported(width, gate_up) or gate_up.shape[1] % 2:
        return torch_elementwise.gated_activation(gate_up, activation)
    out = gate_up.new_empty(num_tokens, width)
    arguments = Activation(
        out=out.data_ptr(),
        gate_up=gate_up.data_ptr(),
        num_tokens=num_tokens,
        width=width,
        stride=gate_up.stride(0),
        out_stride=width,
        is_gelu=activation == "gelu_tanh",
    )
    run(Kernel(function("gated_activation", gate_up.dtype), arguments), out.numel())
    return out


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    """Same as `kernels.elementwise.torch_elementwise.rotary`."""
    half = rotary_dim // 2
    angles = [(query.shape[0], rotary_dim), (query.shape[0], half)]
    fits = cos.shape in angles and cos.shape == sin.shape and query.shape[0] == key.shape[0]
    fits = fits and rotary_dim <= min(query.shape[2], key.shape[2])
    if not fits or not _is_supported(half, query, key, cos, sin):
        torch_elementwise.rotary(query, key, cos, sin, rotary_dim)
        return
    arguments = Rotary(
        rows=(query.data_ptr(), key.data_ptr()),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        num_tokens=query.shape[0],
        num_heads=(query.shape[1], key.shape[1]),
        half=half,
        strides=(query.stride()[:2], key.stride()[:2]),
        cos_stride=cos.stride(0),
        sin_stride=sin.stride(0),
        second_half=cos.shape[-1] - half,
    )
    run(Kernel(function("rotary", query.dtype), arguments), query.numel() + key.numel())


def _is_supported(width: int, *tensors: Tensor) -> bool:
    """Return whether the C++ has a kernel for this width, and all rows are dense and of one dtype
    that it supports."""
    dtypes = {tensor.dtype for tensor in tensors}
    return (
        len(dtypes) == 1
        and dtypes <= SUFFIXES.keys()
        and width % WIDTH == 0
        and all(tensor.stride(-1) == 1 for tensor in tensors)
    )
