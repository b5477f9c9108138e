"""Tells apart what may change the bits of an answer: weights, formats, code and processors."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from core.configuration.options import MemoryOptions, ModelOptions
from core.protocol.facts import Facts
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


def with_digest(facts: Facts, model: ModelOptions, memory: MemoryOptions) -> Facts:
    """Return the facts of an engine that generates with its digest, as `Facts` documents it.

    Raises OSError if a file of the model cannot be read.
    """
    model_dir = Path(facts.model)
    random = "random" if model.load_format == "dummy" else ""
    processor, kernels_digest = _kernels(facts.device)
    code = [version("longshore"), torch.__version__, kernels_digest, facts.executor, facts.decoder]
    if b"longrope" in (model_dir / "config.json").read_bytes():
        code.append(str(memory.max_model_len))  # chooses between its factors
    parts = (
        f"{random}{digest_model(model_dir)[:12]}",
        facts.quantization or "plain",
        facts.dtype,
        facts.kv_dtype,
        processor,
        hashlib.sha256("\0".join(code).encode()).hexdigest()[:8],
        str(facts.num_ranks),
    )
    return msgspec.structs.replace(facts, digest=".".join(parts))


def digest_model(model_dir: Path) -> str:
    """Return a digest of config.json and of the names, headers and samples of the weight files.

    Of a large file it reads the header and 256 KiB.

    Raises OSError if a file cannot be read.
    """
    weights = [*model_dir.glob("*.safetensors")] or [*model_dir.glob("*.bin")]
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
        # A safetensors file begins with the length of its header.
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        for index in range(_SAMPLES):
            file.seek(size * (2 * index + 1) // (2 * _SAMPLES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _kernels(device: str) -> tuple[str, str]:
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
