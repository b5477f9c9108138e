"""Norm, gated activation and rotary embedding, each in one pass over memory.

Inputs that the C++ does not support (other dtypes, odd widths, wrong shapes) go to the torch
version. That version raises for mismatched shapes, which would give the C++ wrong addresses.

torch computes sigmoid, silu and gelu in vectors, and the elements that are left over one by one,
with other bits. Which these are depends on the number of rows and of threads. So functions here use
torch's exp, tanh and erf, in which an element has the same bits at any place.
"""

from __future__ import annotations

import ctypes
import math
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu.calls import SUFFIXES, Kernel, NoKernelError, function, run, token_stride
from kernels.cpu.shared_library import WIDTH
from kernels.elementwise import torch_elementwise

GatedActivation = Literal["silu", "gelu_tanh"]
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "sigmoid": 5}
"""Mirrors `ActivationKind` in vectors.h."""


class Norm(ctypes.Structure):
    """Mirrors `struct Norm` in elementwise.cpp. The classes below also mirror structs there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "rows", "weight", "bias", "residual")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "width")),
        ("strides", ctypes.c_int64 * 2),
        ("out_stride", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        ("rounds_first", ctypes.c_int32),
    )


class Activation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "gate", "up")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "width")),
        ("strides", ctypes.c_int64 * 3),
        ("kind", ctypes.c_int64),
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

    def set_angles(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [T, 2 * half] or [T, half] each, with dense rows of the heads' dtype."""
        self.cos, self.sin, self.num_tokens = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
        self.cos_stride, self.sin_stride = cos.stride(0), sin.stride(0)
        self.second_half = cos.shape[1] - self.half


def rms_norm(
    rows: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, rounds_first: bool = True
) -> Tensor:
    """Same as `kernels.elementwise.torch_elementwise.rms_norm`, for rows [T, width] or [T, heads,
    width]."""
    out = rows.new_empty(rows.shape)
    try:
        kernel = norm(rows, weight, eps, out, offset=offset, rounds_first=rounds_first)
    except NoKernelError:
        return torch_elementwise.rms_norm(
            rows, weight, eps, offset=offset, rounds_first=rounds_first
        )
    run(kernel, rows.numel())
    return out


def norm(
    rows: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    *,
    offset: float = 0.0,
    rounds_first: bool = True,
) -> Kernel[Norm]:
    """Return the kernel that computes `rms_norm`, or raise NoKernelError.

    out: of the shape of rows; tokens may lie apart. residual: like `out`, and may be the same
    tensor; the norm is added to it.
    """
    width = rows.shape[-1]
    if not _is_supported(width, rows, weight) or weight.shape != (width,) or rows.ndim > 3:
        raise NoKernelError(f"no kernel norms a width of {width} in {rows.dtype}")
    heads = rows if rows.ndim == 3 else rows[:, None]
    arguments = Norm(
        out=out.data_ptr(),
        rows=rows.data_ptr(),
        weight=weight.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        num_tokens=heads.shape[0],
        num_heads=heads.shape[1],
        width=width,
        strides=heads.stride()[:2],
        out_stride=token_stride(out, residual),
        eps=eps,
        offset=offset,
        rounds_first=rounds_first,
    )
    return Kernel(function("rms_norm", rows.dtype), arguments, (rows, weight, out, residual))


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Same as `torch.nn.functional.layer_norm` over the last dim, for rows [T, width] or [T, heads,
    width]."""
    out = rows.new_empty(rows.shape)
    try:
        kernel = centered_norm(rows, weight, bias, eps, out)
    except NoKernelError:
        return torch_elementwise.layer_norm(rows, weight, bias, eps)
    run(kernel, rows.numel())
    return out


def centered_norm(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
) -> Kernel[Norm]:
    """Return the kernel that computes `layer_norm`, or raise NoKernelError.

    out, residual: as in `norm`. out may be `rows` if these are laid out like it.
    """
    kernel = norm(rows, weight, eps, out, residual)
    if bias is not None:
        if bias.shape != weight.shape or not _is_supported(rows.shape[-1], rows, bias):
            raise NoKernelError(f"no kernel adds a bias {list(bias.shape)} in {bias.dtype}")
        kernel.arguments.bias = bias.data_ptr()
    return kernel._replace(function=function("layer_norm", rows.dtype), kept=(*kernel.kept, bias))


def gated_activation(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """Same as `kernels.elementwise.torch_elementwise.gated_activation`."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    try:
        kernel = gated(*gate_up.tensor_split(2, 1), activation, out)
    except NoKernelError:
        return torch_elementwise.gated_activation(gate_up, activation)
    run(kernel, out.numel())
    return out


def sigmoid_gate(gate: Tensor, rows: Tensor) -> Tensor:
    """Same as `kernels.elementwise.torch_elementwise.sigmoid_gate`."""
    out = rows.new_empty(rows.shape)
    try:
        kernel = gated(gate, rows, "sigmoid", out)
    except NoKernelError:
        return sigmoid(gate) * rows
    run(kernel, out.numel())
    return out


def gated(
    gate: Tensor, up: Tensor, activation: str, out: Tensor
) -> Kernel[Activation]:
    """Return the kernel that computes `activation(gate) * up`, or raise NoKernelError.

    activation: one of ACTIVATIONS. gate, up, out: [T, I], dense in the last dim; out may be one of
    the others.
    """
    width = gate.shape[1]
    if not _is_supported(WIDTH, gate, up) or gate.shape != up.shape:  # any width
        raise NoKernelError(f"no kernel gates a width of {width} in {gate.dtype}")
    arguments = Activation(
        out=out.data_ptr(),
        gate=gate.data_ptr(),
        up=up.data_ptr(),
        num_tokens=gate.shape[0],
        width=width,
        strides=tuple(rows.stride(0) for rows in (out, gate, up)),
        kind=ACTIVATIONS[activation],
    )
    return Kernel(function("gated_activation", gate.dtype), arguments, (gate, up, out))


def sigmoid(numbers: Tensor) -> Tensor:
    """Same as `torch.sigmoid`."""
    return (1 / (1 + torch.exp(-numbers.float()))).to(numbers.dtype)


def gelu(numbers: Tensor) -> Tensor:
    """Same as `torch.nn.functional.gelu`."""
    wide = numbers.float()
    return (wide * 0.5 * (1 + torch.erf(wide * 0.5**0.5))).to(numbers.dtype)


def gelu_tanh(numbers: Tensor) -> Tensor:
    """Same as `torch.nn.functional.gelu` with approximate="tanh"."""
    wide = numbers.float()
    inner = (2 / math.pi) ** 0.5 * (wide + 0.044715 * (wide * wide * wide))
    return (wide * 0.5 * (1 + torch.tanh(inner))).to(numbers.dtype)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    """Same as `kernels.elementwise.torch_elementwise.rotary`."""
    half = rotary_dim // 2
    angles = [(query.shape[0], rotary_dim), (query.shape[0], half)]
    fits = cos.shape in angles and cos.shape == sin.shape and query.shape[0] == key.shape[0]
    fits = fits and rotary_dim <= min(query.shape[2], key.shape[2])
    if not fits or not _is_supported(half, query, key, cos, sin):
        torch_elementwise.rotary(query, key, cos, sin, rotary_dim)
        return
    kernel = rotation(query, key, rotary_dim)
    kernel.arguments.set_angles(cos, sin)
    run(kernel, query.numel() + key.numel())


def rotation(query: Tensor, key: Tensor, rotary_dim: int) -> Kernel[Rotary]:
    """Return the kernel that computes `rotary` once its angles are set, or raise NoKernelError."""
    half = rotary_dim // 2
    if not _is_supported(half, query, key) or rotary_dim > min(query.shape[2], key.shape[2]):
        raise NoKernelError(f"no kernel rotates {rotary_dim} dims of a head in {query.dtype}")
    arguments = Rotary(
        rows=(query.data_ptr(), key.data_ptr()),
        num_heads=(query.shape[1], key.shape[1]),
        half=half,
        strides=(query.stride()[:2], key.stride()[:2]),
    )
    return Kernel(function("rotary", query.dtype), arguments, (query, key))


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
