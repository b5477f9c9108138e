"""MXFP4 experts, as gpt-oss publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.weights import Float4Weight


class Mxfp4:
    """`quant_method: mxfp4`: NAME_blocks [experts, out, in / 32, 16] and NAME_scales [experts, out,
    in / 32], both uint8. Only experts are quantized."""

    markers: tuple[str, ...] = ("_blocks",)
    unused_suffixes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass  # the config says nothing else that matters

    def read(self, checkpoint: Checkpoint, name: str) -> Float4Weight:
        """Take the weight [experts * out, in] of all experts."""
        blocks = checkpoint.take_stored(f"{name}_blocks", torch.uint8)
        exponents = checkpoint.take_stored(f"{name}_scales", torch.uint8)
        if blocks.shape[:-1] != exponents.shape or blocks.shape[-1] != 16:
            raise checkpoint.error(f"{name}_scales", f"does not fit {list(blocks.shape)} blocks")
        return Float4Weight(blocks.flatten(0, 1).flatten(1), exponents.flatten(0, 1))
