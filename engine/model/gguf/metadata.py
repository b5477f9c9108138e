"""A GGUF file's metadata and list of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFReader

from core.errors import ConfigurationError


class Tensor(NamedTuple):
    """A tensor's place in its file."""

    file: Path
    type: str
    """ggml's name of the type of its elements, such as Q8_0."""
    offset: int
    """In bytes, from the start of the file."""
    shape: tuple[int, ...]
    """In elements, as torch has it: [out, in] of a linear layer."""


class Metadata:
    """What a GGUF file says of its model. Keys are those of the format's description."""

    def __init__(self, files: Sequence[Path]) -> None:
        """files: the parts of the file, in order. Raises ConfigurationError if one is broken."""
        self.file = files[0]
        readers = [_open(file) for file in files]
        self._fields = readers[0].fields
        self.tensors: Mapping[str, Tensor] = {
            tensor.name: Tensor(
                file,
                tensor.tensor_type.name,
                tensor.data_offset,
                tuple(reversed(tensor.shape.tolist())),
            )
            for file, reader in zip(files, readers, strict=True)
            for tensor in reader.tensors
        }
        self.architecture = str(self.required("general.architecture"))

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` if the file has none. `{arch}` stands for its name."""
        field = self._fields.get(self._full(key))
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        """Return a value. Raises ConfigurationError if the file has none."""
        value = self.get(key)
        if value is None:
            raise ConfigurationError(
                f"{self.file} lacks {self._full(key)}: make the file again with llama.cpp's "
                "convert_hf_to_gguf.py"
            )
        return value

    def values(self, name: str) -> list[float]:
        """Return the elements of a tensor in fp32, such as the factors of rotary frequencies."""
        tensor = self.tensors[name]
        import numpy

        if tensor.type != "F32":
            raise self.error(f"tensor '{name}' is {tensor.type}, not F32")
        found = numpy.fromfile(
            tensor.file, numpy.float32, count=tensor.shape[0], offset=tensor.offset
        )
        return found.tolist()

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.file}: {problem}")

    def _full(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key


def _open(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ConfigurationError(
            f"{file} is not a GGUF file that can be read ({error}): download it again"
        ) from error
