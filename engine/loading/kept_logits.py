"""Keeps transformers' logits of a model's first layers, which the trial compares with ours.

To compute them, a start imports transformers' models and loads some layers twice, which takes a
small model longer than all the rest. Our own layers are computed, and compared, at every start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.process.measured import keep, path_of
from engine.digest import digest_model
from engine.loading.model_source import ModelSource


class KeptLogits:
    """The logits that an earlier start has computed with the same files and libraries."""

    def __init__(self, source: ModelSource) -> None:
        """source: its config sets the number of layers."""
        self._path = None
        if source.is_keepable:
            parts = repr(list(_dependencies(source)))
            self._path = path_of(hashlib.sha256(parts.encode()).hexdigest()[:32], ".logits")

    def read(self) -> Tensor | None:
        """Return the logits [vocab_size] in fp32; None if there are none."""
        try:
            content = b"" if self._path is None else self._path.read_bytes()
        except OSError:
            return None
        return torch.frombuffer(bytearray(content), dtype=torch.float32) if content else None

    def write(self, logits: Tensor) -> None:
        """Keep the logits for later starts, if they can be written."""
        if self._path is not None:
            keep(self._path, logits.cpu().numpy().tobytes())


def _dependencies(source: ModelSource) -> Iterator[object]:
    yield torch.__version__, version("transformers"), source.dtype, source.device.type
    config: Any = source.config
    # All that differs from config.json, which is part of the digest below.
    yield config.model_type, config.num_hidden_layers, getattr(config, "rope_parameters", None)
    yield digest_model(source.model_dir), [*_stamps(source.model_dir)]


def _stamps(model_dir: Path) -> Iterator[tuple[str, int]]:
    """Yield the weight files' times of change: of a large file, the digest reads only samples."""
    for path in sorted(model_dir.glob("*.safetensors")) or sorted(model_dir.glob("*.bin")):
        yield path.name, path.stat().st_mtime_ns
