"""AWQ: int4 with zeros, in the layout of AutoAWQ's "gemm" kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.packing import unpack_columns
from engine.model.quantization.weights import IntegerWeight

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each half byte of an int32 holds, the lowest first."""


class Awq:
    """`quant_method: awq`: qweight [in, out / 8], qzeros [groups, out / 8] and
    scales [groups, out]."""

    markers: tuple[str, ...] = (".qweight",)
    unused_suffixes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError for other layouts, and for bits other than 4."""
        bits = config.get("bits") or config.get("w_bit") or BITS
        if bits != BITS:
            raise ValueError(f"bits={bits}")
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            raise ValueError(f"version={version}")

    def read(self, checkpoint: Checkpoint, name: str) -> IntegerWeight:
        codes = _unpack(checkpoint.take_stored(f"{name}.qweight", torch.int32))
        scales = checkpoint.take_stored(f"{name}.scales").float()
        groups, outputs = scales.shape
        inputs = codes.shape[0]
        if codes.shape[1] != outputs or inputs % groups:
            raise checkpoint.error(f"{name}.scales", f"does not fit {list(codes.shape)} codes")
        zeros = torch.full(scales.shape, 2 ** (BITS - 1), dtype=torch.uint8)
        if f"{name}.qzeros" in checkpoint:  # "zero_point": true
            zeros = _unpack(checkpoint.take_stored(f"{name}.qzeros", torch.int32))
        if zeros.shape != scales.shape:
            raise checkpoint.error(f"{name}.qzeros", f"does not fit {list(scales.shape)} scales")
        return IntegerWeight(
            codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), BITS,
            inputs // groups,
        )  # fmt: skip


def _unpack(packed: Tensor) -> Tensor:
    """Return codes [n, m * 8] uint8 of int32 [n, m]."""
    octets = unpack_columns(packed, BITS).unflatten(1, (-1, 8))
    places = torch.tensor(ORDER).argsort()
    return octets[..., places].flatten(1)
