"""FP8 as DeepSeek and Qwen publish it: e4m3 weights with a scale for each block of 128 × 128."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.readers import DEFAULT_BLOCK, float8_weight
from engine.model.quantization.weights import Float8Weight


class FineGrainedFp8:
    """`quant_method: fp8`: a scale for each block, or one for a whole layer."""

    markers: tuple[str, ...] = (".weight_scale_inv", ".weight_scale")
    # Activations are scaled row by row as they come, which is more exact than a static scale.
    unused_suffixes: tuple[str, ...] = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError for scales other than floats and for experts other than FP8."""
        for key, readable in (("scale_fmt", "float"), ("expert_dtype", "fp8")):
            if config.get(key) not in (None, readable):
                raise ValueError(f"{key}={config[key]}")
        self._block = tuple(config.get("weight_block_size") or DEFAULT_BLOCK)

    def read(self, checkpoint: Checkpoint, name: str) -> Float8Weight:
        codes = checkpoint.take_stored(f"{name}.weight", torch.float8_e4m3fn)
        scale = next(
            f"{name}{marker}" for marker in self.markers if f"{name}{marker}" in checkpoint
        )
        scales = checkpoint.take_stored(scale)
        return float8_weight(codes, scales, self._block, checkpoint, scale)
