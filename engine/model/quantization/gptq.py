"""GPTQ: int4 or int8 with groups of inputs, in the layouts of AutoGPTQ and GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.packing import unpack_columns, unpack_rows
from engine.model.quantization.readers import sorted_by_group
from engine.model.quantization.weights import IntegerWeight, PermutedWeight

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""The number to add to stored zeros, by `checkpoint_format`: "gptq" stores zeros minus 1.

GPTQModel subtracts the 1s from whole int32 words, so that a zero point of 0 borrows from its
neighbour in the word. For the same reason the 1s must be added to whole words.
"""


class Gptq:
    """`quant_method: gptq`: qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales
    [groups, out], g_idx [in].

    A layer's bits and group size follow from its shapes, because the config's `dynamic` may set
    other values for some layers.
    """

    markers: tuple[str, ...] = (".qweight",)
    unused_suffixes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError for other layouts, and for bits other than 4 and 8."""
        if config.get("bits") not in (4, 8):
            raise ValueError(f"bits={config.get('bits')}")
        layout = config.get("checkpoint_format") or "gptq"
        if layout not in ZERO_OFFSETS:
            raise ValueError(f"checkpoint_format={layout}")
        self._zero_offset = ZERO_OFFSETS[layout]

    def read(self, checkpoint: Checkpoint, name: str) -> IntegerWeight | PermutedWeight:
        packed = checkpoint.take_stored(f"{name}.qweight", torch.int32)
        packed_zeros = checkpoint.take_stored(f"{name}.qzeros", torch.int32)
        scales = checkpoint.take_stored(f"{name}.scales").float()
        groups, outputs = scales.shape
        bits, rest = divmod(32 * packed_zeros.shape[1], outputs)
        fits = packed_zeros.shape[0] == groups and packed.shape[1] == outputs and not rest
        if bits not in (4, 8) or not fits:
            raise checkpoint.error(f"{name}.scales", f"does not fit {list(packed.shape)} codes")
        codes = unpack_rows(packed, bits).T.contiguous()
        group_size, rest = divmod(codes.shape[1], groups)
        if rest:
            raise checkpoint.error(f"{name}.scales", f"has {groups} groups for {len(packed)} rows")
        ones = sum(1 << shift for shift in range(0, 32, bits))
        zeros = unpack_columns(packed_zeros + self._zero_offset * ones, bits)
        weight = IntegerWeight(codes, scales.T.contiguous(), zeros.T.contiguous(), bits, group_size)
        return sorted_by_group(weight, checkpoint, f"{name}.g_idx")
