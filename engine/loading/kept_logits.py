"""Keeps transformers' logits of a model's first layers, which the trial compares with ours.

To compute them, a start imports transformers' models and loads some layers twice, which takes a
small model longer than all the rest. Our own layers are computed, and compared, at every start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

from core.process.measured import keep, path_of
from engine.digest import digest_model
from engine.loading.model_source import ModelSource


class KeptLogits:
    """The logits that an earlier start has computed with the same files and libraries."""

    def __init__(self, source: ModelSource) -> None:
        """source: its config sets the number of layers."""
        # Of other models, this project's code makes the weights, or code of the model's directory
        # computes the logits. Either may change.
        self._path = None
        from_others = not (source.is_quantized or source.is_gguf or source.is_dummy)
        if from_others and not source.trust_remote_code:
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
    yield torch.__version__, transformers.__version__, source.dtype, source.device.type
    yield source.config.to_json_string(use_diff=False)
    yield digest_model(source.model_dir), [*_stamps(source.model_dir)]


def _stamps(model_dir: Path) -> Iterator[tuple[str, int]]:
    """Yield the weight files' times of change: of a large file, the digest reads only samples."""
    for path in sorted(model_dir.glob("*.safetensors")) or sorted(model_dir.glob("*.bin")):
        yield path.name, path.stat().st_mtime_ns
