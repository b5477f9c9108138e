"""The operations of layers with state: a short convolution and the recurrences.

Inputs that the C++ does not support go to the torch versions.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.calls import SUFFIXES, Kernel, NoKernelError, function, run
from kernels.cpu.shared_library import WIDTH
from kernels.state import reference
from kernels.state.batch import StateBatch

MAX_TAPS = 8
MAX_KEY_DIM = 256


class Batch(ctypes.Structure):
    """Mirrors `struct Batch` in state.cpp. The classes below also mirror structs there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "reads", "writes")),
        ("num_sequences", ctypes.c_int64),
    )


class Convolution(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "rows", "before", "after")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "tails")),
        ("batch", Batch),
        *((name, ctypes.c_int64) for name in ("num_channels", "taps", "slot_stride")),
        ("strides", ctypes.c_int64 * 4),
        ("is_silu", ctypes.c_int32),
    )

    def set_batch(self, batch: StateBatch) -> None:
        _set_batch(self.batch, batch)


class Recurrence(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("decay", "rate", "skip", "states")),
        ("batch", Batch),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_key_heads", "key_dim")),
        *((name, ctypes.c_int64) for name in ("value_dim", "slot_stride")),
        ("strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int32) for name in ("is_delta", "has_narrow_states")),
    )

    def set_batch(self, batch: StateBatch) -> None:
        _set_batch(self.batch, batch)


class Gates(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("decay", "rate", "time", "rates")),
        *((name, ctypes.c_void_p) for name in ("scale", "offset")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads")),
        ("strides", ctypes.c_int64 * 2),
    )


def state_gates(
    time: Tensor, rates: Tensor | None, scale: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as `kernels.state.reference.state_gates`."""
    decay, rate = torch.empty(2, *time.shape, dtype=torch.float32)
    try:
        kernel = gates(time, rates, scale, offset, decay, rate)
    except NoKernelError:
        return reference.state_gates(time, rates, scale, offset)
    run(kernel, time.numel())
    return decay, rate


def gates(
    time: Tensor,
    rates: Tensor | None,
    scale: Tensor,
    offset: Tensor,
    decay: Tensor,
    rate: Tensor,
) -> Kernel[Gates]:
    """Return the kernel that writes the results of `state_gates` to `decay` and `rate`, fp32 and
    dense, or raise NoKernelError."""
    given = (time,) if rates is None else (time, rates)
    if not _is_supported(time.dtype, *given):
        raise NoKernelError(f"no kernel computes gates in {time.dtype}")
    arguments = Gates(
        decay=decay.data_ptr(),
        rate=rate.data_ptr(),
        time=time.data_ptr(),
        rates=_address(rates),
        scale=scale.data_ptr(),
        offset=offset.data_ptr(),
        num_tokens=time.shape[0],
        num_heads=time.shape[1],
        strides=(time.stride(0), 0 if rates is None else rates.stride(0)),
    )
    return Kernel(function("state_gates", time.dtype), arguments, (*given, scale, offset))


class Scan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("rate", "scale", "skip", "states")),
        ("batch", Batch),
        *((name, ctypes.c_int64) for name in ("num_channels", "size", "slot_stride")),
        ("strides", ctypes.c_int64 * 4),
        ("has_narrow_states", ctypes.c_int32),
    )


def conv_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    batch: StateBatch,
    *,
    silu: bool = False,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Same as `kernels.state.reference.conv_rows`."""
    options = {"silu": silu, "before": before, "after": after}
    out = rows.new_empty(rows.shape)
    try:
        kernel = convolution(rows, weight, bias, tails, out, **options)
    except NoKernelError:
        return reference.conv_rows(rows, weight, bias, tails, batch, **options)
    kernel.arguments.set_batch(batch)
    run(kernel, rows.numel() * len(weight))
    return out


def convolution(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    out: Tensor,
    *,
    silu: bool = False,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Kernel[Convolution]:
    """Return the kernel that computes `conv_rows` once its batch is set, or raise NoKernelError.

    out: [T, C], dense in the last dim; may be `rows`.
    """
    taps, num_channels = weight.shape
    given = [each for each in (rows, weight, bias, tails, out, before, after) if each is not None]
    if not _is_supported(rows.dtype, *given) or num_channels % WIDTH or not 2 <= taps <= MAX_TAPS:
        raise NoKernelError(
            f"no kernel convolves {num_channels} channels of {rows.dtype} with {taps} taps"
        )
    if not weight.is_contiguous() or tails.shape[1:] != (taps - 1, num_channels):
        raise NoKernelError("the weight or the slots are not dense")
    parts = (out, rows, before, after)
    arguments = Convolution(
        out=out.data_ptr(),
        rows=rows.data_ptr(),
        before=_address(before),
        after=_address(after),
        weight=weight.data_ptr(),
        bias=_address(bias),
        tails=tails.data_ptr(),
        num_channels=num_channels,
        taps=taps,
        slot_stride=tails.stride(0),
        strides=tuple(0 if each is None else each.stride(0) for each in parts),
        is_silu=silu,
    )
    return Kernel(function("conv_rows", rows.dtype), arguments, tuple(given))


def state_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    is_delta: bool,
    skip: Tensor | None = None,
) -> Tensor:
    """Same as `kernels.state.reference.state_step`, also for prompts.

    On CPUs, tiles would not be faster: a part of a state stays in the L1 cache from token to token,
    and a tile takes as many multiplications.
    """
    out = value.new_empty(value.shape)
    tokens = (query, key, value, decay, rate)
    try:
        kernel = recurrence(*tokens, states, out, is_delta=is_delta, skip=skip)
    except NoKernelError:
        return reference.state_step(*tokens, states, batch, is_delta=is_delta, skip=skip)
    kernel.arguments.set_batch(batch)
    run(kernel, value.numel() * query.shape[2])
    return out


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    out: Tensor,
    *,
    is_delta: bool,
    skip: Tensor | None = None,
) -> Kernel[Recurrence]:
    """Return the kernel that computes `state_step` once its batch is set, or raise NoKernelError.

    out: like `value`, whose heads are dense. It may be the same tensor.
    """
    (_, num_heads, value_dim), (_, num_key_heads, key_dim) = value.shape, query.shape
    rows = (query, key, value, out)
    if (
        not _is_supported(value.dtype, *rows)
        or states.dtype not in SUFFIXES
        or any(dim % WIDTH for dim in (key_dim, value_dim))
        or key_dim > MAX_KEY_DIM
    ):
        raise NoKernelError(
            f"no kernel has states of {key_dim} x {value_dim} in {states.dtype} and rows in "
            f"{value.dtype}"
        )
    if (
        states.shape[1:] != (num_heads, key_dim, value_dim)
        or not states[:1].is_contiguous()
        or any(each.stride(1) != each.shape[2] and each.shape[1] > 1 for each in rows)
        or any(each.dtype != torch.float32 or not each.is_contiguous() for each in (decay, rate))
    ):
        raise NoKernelError("the heads of a token, its gates or a slot are not dense")
    arguments = Recurrence(
        out=out.data_ptr(),
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        decay=decay.data_ptr(),
        rate=rate.data_ptr(),
        skip=_address(skip),
        states=states.data_ptr(),
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        slot_stride=states.stride(0),
        strides=tuple(each.stride(0) for each in (out, query, key, value)),
        is_delta=is_delta,
        has_narrow_states=states.dtype == torch.bfloat16,
    )
    kept = (*rows, decay, rate, skip, states)
    return Kernel(function("state_step", value.dtype), arguments, kept)


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    scale: Tensor,
    skip: Tensor,
    states: Tensor,
    batch: StateBatch,
) -> Tensor:
    """Same as `kernels.state.reference.scan`."""
    (num_channels, size), out = (value.shape[1], query.shape[1]), value.new_empty(value.shape)
    rows, gates = (out, query, key, value), (rate, scale, skip)
    if (
        not _is_supported(value.dtype, *rows)
        or states.dtype not in SUFFIXES
        or num_channels % WIDTH
        or size > MAX_KEY_DIM
        or not states[:1].is_contiguous()
        or any(each.dtype != torch.float32 or not each.is_contiguous() for each in gates)
    ):
        return reference.scan(query, key, value, rate, scale, skip, states, batch)
    arguments = Scan(
        *(each.data_ptr() for each in (*rows, *gates, states)),
        num_channels=num_channels,
        size=size,
        slot_stride=states.stride(0),
        strides=tuple(each.stride(0) for each in rows),
        has_narrow_states=states.dtype == torch.bfloat16,
    )
    _set_batch(arguments.batch, batch)
    kernel = Kernel(function("scan", value.dtype), arguments, (*rows, *gates, states))
    run(kernel, value.numel() * size)
    return out


def _set_batch(places: Batch, batch: StateBatch) -> None:
    """Raises ValueError for index tensors that the C++ would misread."""
    dtypes = {"starts": torch.int32, "reads": torch.int64, "writes": torch.int64}
    for name, dtype in dtypes.items():
        ids = getattr(batch, name)
        if ids.dtype != dtype or not ids.is_contiguous():
            raise ValueError(f"{name} is {ids.dtype}; it must be dense {dtype}")
    places.starts = batch.starts.data_ptr()
    places.reads, places.writes = batch.reads.data_ptr(), batch.writes.data_ptr()
    places.num_sequences = len(batch.reads)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_supported(dtype: torch.dtype, *tensors: Tensor) -> bool:
    same_dtype = all(tensor.dtype == dtype for tensor in tensors)
    return dtype in SUFFIXES and same_dtype and all(tensor.stride(-1) == 1 for tensor in tensors)
