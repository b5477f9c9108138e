"""Tells models and kernels apart by their files."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from kernels.cpu import shared_library
from kernels.cpu.shared_library import LibraryError, host_target, load_library

_KERNELS = Path(shared_library.__file__).parents[1]
_SAMPLES = 64
"""Samples per file. A file of 5 GB has one every 80 MB."""
_SAMPLE_BYTES = 4096
_WHOLE_BYTES = 2**20
"""Files up to this size are read whole."""
_MAX_HEADER_BYTES = 10**8
"""The limit of safetensors itself."""


def digest_model(model_dir: Path) -> str:
    """Return a digest of config.json and of the names, headers and samples of the weight files.

    Of a large file it reads the header and 256 KiB.

    Raises OSError if a file cannot be read.
    """
    kinds = (sorted(model_dir.glob(f"*.{end}")) for end in ("safetensors", "gguf", "bin"))
    weights = next(filter(None, kinds), [])
    return digest_files([*weights, *model_dir.glob("config.json")])


def digest_files(paths: Iterable[Path]) -> str:
    """Return a digest of files as `digest_model` does. Raises OSError if one cannot be read."""
    return hashlib.sha256(b"".join(map(_digest_file, sorted(paths)))).hexdigest()


def _digest_file(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(f"{path.name}\0{size}\0".encode())
        file.seek(0)
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
            return digest.digest()
        if path.suffix != ".gguf":
            # A safetensors file begins with the length of its header.
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        for index in range(_SAMPLES):
            file.seek(size * (2 * index + 1) // (2 * _SAMPLES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def kernels_digest(device: str) -> tuple[str, str]:
    """Return the name of the processor's instruction set, and a digest of the kernels for it.

    On CPUs that of the compiled library, so that it also tells compilers apart.
    """
    if device != "cpu":
        major, minor = torch.cuda.get_device_capability(device)
        sources = [*_KERNELS.rglob("*.py"), *_KERNELS.glob("*.json")]
        return f"sm{major}{minor}", digest_files(sources)
    try:
        return host_target().name, load_library().digest
    except LibraryError:
        return platform.machine(), ""
