"""The tensors of a translated directory: where they are in its GGUF files, and how to read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from core.files.gguf import GGUF_INDEX

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose elements torch has, too."""
OFFSET = ("Q6_K", "Q5_K", "Q4_K")
"""Types that become an `OffsetWeight`, which only the C++ kernels take."""
FLOATS = ("MXFP4",)
"""Types that become a `Float4Weight`, which the C++ kernels do not take."""


class StoredTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor by its name in transformers' modules."""

    name: str
    file: str
    """Name of a file of the directory."""
    type: str
    """ggml's name of its type."""
    offset: int
    """In bytes."""
    shape: tuple[int, ...]
    """In elements, as torch has it."""
    layer: int | None = None
    """The layer that it belongs to; None: to the embedding, the head or the final norm."""
    num_pairs: int = 0
    """If not 0: neighbouring rows rotate together, and belong half of the rows of a head apart.
    This is the number of heads."""
    subtracted: float = 0.0
    """Number to subtract from every element."""
    is_packed: bool = False
    """Whether a weight is served from the bits in the file."""

    @property
    def entry_name(self) -> str:
        """Its name in a checkpoint. If it is packed, the type stands in place of `weight`."""
        return f"{self.name.removesuffix('weight')}{self.type}" if self.is_packed else self.name

    def packed(self, data: Tensor) -> Tensor:
        """Return the bytes of its rows, [rows, bytes]. data: those of the file, [bytes]."""
        num_rows = math.prod(self.shape) // (self.shape[-1] if len(self.shape) > 1 else 1)
        size = num_bytes(self.shape, self.type)
        rows = data[self.offset : self.offset + size].view(num_rows, -1)
        if self.num_pairs:
            rows = rows.unflatten(0, (self.num_pairs, -1, 2)).transpose(1, 2).flatten(0, 2)
        return rows

    def dense(self, data: Tensor) -> Tensor:
        """Return it as floats, in fp32 unless the file has them in 16 bits."""
        rows = self.packed(data)
        if self.type in PLAIN:
            values = rows.view(PLAIN[self.type])
        else:
            values = torch.from_numpy(quants.dequantize(rows.numpy(), self._kind))
        values = values.view(self.shape)
        return values.float() - self.subtracted if self.subtracted else values

    @property
    def _kind(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.type]


def num_bytes(shape: Sequence[int], type: str) -> int:
    """Return the bytes of a tensor of this type of ggml's."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return math.prod(shape) // block * block_bytes


def can_unpack(type: str) -> bool:
    """Whether a tensor of this type of ggml's can be read."""
    return type in PLAIN or hasattr(quants, type)


def gguf_entries(model_dir: Path) -> dict[str, tuple[str, Callable[[], Tensor]]]:
    """Return the files and readers of all tensors, by `entry_name`. Packed ones are uint8."""
    tensors = read_index(model_dir)
    files = mapped_files(model_dir, tensors)
    return {
        tensor.entry_name: (
            str((model_dir / tensor.file).resolve()),
            partial(tensor.packed if tensor.is_packed else tensor.dense, files[tensor.file]),
        )
        for tensor in tensors
    }


def storage_note(model_dir: Path, *, has_panels: bool) -> str:
    """Say for the start-up output what is served from its bits, and what is not.

    has_panels: whether the C++ kernels multiply.
    """
    tensors = read_index(model_dir)
    served = {tensor.type for tensor in tensors if tensor.is_packed}
    packed = sorted(served - set(FLOATS if has_panels else OFFSET))
    unpacked = sorted({tensor.type for tensor in tensors} - PLAIN.keys() - set(packed))
    notes = []
    if packed:
        notes.append(f"{', '.join(packed)} weights stay quantized")
    if unpacked:
        notes.append(f"{', '.join(unpacked)} weights are unpacked to option.dtype")
    return f"GGUF: {'; '.join(notes) or 'no weight is quantized'}"


def read_index(model_dir: Path) -> list[StoredTensor]:
    return msgspec.json.decode((model_dir / GGUF_INDEX).read_bytes(), type=list[StoredTensor])


def mapped_files(model_dir: Path, tensors: list[StoredTensor]) -> Mapping[str, Tensor]:
    """Map the files into memory, privately: [bytes] uint8 each."""
    paths = {name: model_dir / name for name in {tensor.file for tensor in tensors}}
    return {
        name: torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        for name, path in paths.items()
    }
