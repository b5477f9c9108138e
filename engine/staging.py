"""Asynchronous copies of arrays from the host to the device and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Each array starts at a multiple of this many bytes, for vectorized loads."""


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Staging:
    """Copies arrays of the host to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = _PinnedBuffers(device) if device.type == "cuda" else None

    def upload(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Start copying `arrays` to the device. Return tensors of the same shapes and types."""
        if self._pinned is not None:
            return self._pinned.upload(arrays)
        return [torch.from_numpy(array.copy()).to(self.device) for array in arrays]


class Slot:
    """The place of an array in an upload."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor | None = None) -> None:
        """tensor: one that is on the device already."""
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        """The array on the device. Raises RuntimeError before the upload is sent."""
        if self._tensor is None:
            raise RuntimeError("the upload has not been sent")
        return self._tensor


class Upload:
    """Collects arrays and sends them to the device in one copy."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._arrays: list[NDArray[np.generic]] = []
        self._slots: list[Slot] = []

    def put(self, array: NDArray[np.generic]) -> Slot:
        """Add an array, which `send` copies as it is then."""
        self._arrays.append(array)
        self._slots.append(Slot())
        return self._slots[-1]

    def send(self) -> None:
        """Start the copy. Call once, after the last `put`."""
        if self._arrays:
            tensors = self._staging.upload(self._arrays)
            for slot, tensor in zip(self._slots, tensors, strict=True):
                slot._tensor = tensor


class HostCopy:
    """An asynchronous copy of tensors to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copy. Does not wait."""
        self._tensors = [_start_copy(tensor) for tensor in tensors]
        self._copied = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors) else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[Tensor]:
        """Block until the copy is done. Return the tensors on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


def _start_copy(tensor: Tensor) -> Tensor:
    """Return a host tensor, which is filled once the device reaches this copy."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class _PinnedBuffers:
    """Pinned host buffers, used in turn, for copies to a GPU.

    A copy from pageable memory blocks the host until the device has finished all earlier work. A
    copy from pinned memory does not. That copy may still be queued when the next step's arrays are
    written, so the next step uses another buffer.
    """

    def __init__(self, device: torch.device, num_buffers: int = 3) -> None:
        self._buffers = [_Buffer(device) for _ in range(num_buffers)]
        self._turn = 0

    def upload(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Copy all arrays in one copy."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += aligned(array.nbytes)
        self._turn = (self._turn + 1) % len(self._buffers)
        host = self._buffers[self._turn].of_size(end)
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes].numpy()[:] = _bytes(array)
        device = self._buffers[self._turn].copy_to_device(end)
        return [
            device[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]


class _Buffer:
    """A pinned host buffer and the event of its last copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event()

    def of_size(self, num_bytes: int) -> Tensor:
        """Return at least `num_bytes` bytes to write to, once the last copy is done."""
        self._copied.synchronize()
        if len(self._bytes) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._bytes

    def copy_to_device(self, num_bytes: int) -> Tensor:
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        target.copy_(self._bytes[:num_bytes], non_blocking=True)
        self._copied.record()
        return target


def _bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _torch_dtype(array: NDArray[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
