"""The compressed-tensors format of llm-compressor: FP8, int8, and int4 packed into int32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.packing import unpack_columns, unpack_rows
from engine.model.quantization.readers import DEFAULT_BLOCK, float8_weight, sorted_by_group
from engine.model.quantization.weights import Float8Weight, IntegerWeight, PermutedWeight

LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
READABLE = {("float", 8), ("int", 8), ("int", 4)}
"""(type, bits) of weights."""


class CompressedTensors:
    """`quant_method: compressed-tensors`.

    A layer's tensors show its format: `weight_packed` holds int4 or int8, `weight` int8 or FP8. If
    activations are quantized, each row gets its scale at run time. This is more exact than the
    static scales of the checkpoint, which are ignored.
    """

    markers: tuple[str, ...] = (".weight_scale",)
    unused_suffixes: tuple[str, ...] = (
        *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
        *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError for sparse, rotated, NVFP4 and other weights that it cannot read."""
        sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise ValueError(f"sparsity_config.format={sparsity}")
        if config.get("transform_config"):
            raise ValueError("a transform_config")
        groups: Mapping[str, Any] = config.get("config_groups") or {}
        for group in groups.values():
            layout = group.get("format") or config.get("format")
            weights = group["weights"] or {}
            stored = weights.get("type"), weights.get("num_bits")
            if layout not in LAYOUTS or stored not in READABLE:
                raise ValueError(f"format={layout} of {stored[1]}-bit {stored[0]} weights")
        blocks = [group["weights"].get("block_structure") for group in groups.values()]
        self._block = tuple(next(filter(None, blocks), DEFAULT_BLOCK))

    def read(
        self, checkpoint: Checkpoint, name: str
    ) -> Float8Weight | IntegerWeight | PermutedWeight:
        scales = checkpoint.take_stored(f"{name}.weight_scale").float()
        if f"{name}.weight_packed" in checkpoint:
            return _packed(checkpoint, name, scales)
        codes = checkpoint.take_stored(f"{name}.weight")
        if codes.dtype == torch.float8_e4m3fn:
            return float8_weight(codes, scales, self._block, checkpoint, f"{name}.weight_scale")
        if codes.dtype != torch.int8:
            raise checkpoint.error(f"{name}.weight", f"is {codes.dtype}, not int8 or float8_e4m3fn")
        zero_name = f"{name}.weight_zero_point"
        zeros = checkpoint.take_stored(zero_name) if zero_name in checkpoint else None
        return _integers(checkpoint, name, _unsigned(codes, 8), scales, zeros, 8)


def _packed(checkpoint: Checkpoint, name: str, scales: Tensor) -> IntegerWeight | PermutedWeight:
    """Read weight_packed [out, in * bits / 32]; its zeros are packed along the outputs."""
    rows, columns = checkpoint.take_stored(f"{name}.weight_shape").tolist()
    packed = checkpoint.take_stored(f"{name}.weight_packed", torch.int32)
    bits = next((bits for bits in (4, 8) if packed.shape[1] == -(-columns * bits // 32)), 0)
    if not bits or packed.shape[0] != rows:
        raise checkpoint.error(
            f"{name}.weight_packed", f"has shape {list(packed.shape)} for {rows} x {columns} codes"
        )
    codes = unpack_columns(packed, bits)[:, :columns]
    zero_name, zeros = f"{name}.weight_zero_point", None
    if zero_name in checkpoint:
        zeros = checkpoint.take_stored(zero_name)
        if zeros.dtype == torch.int32:
            middle = 2 ** (bits - 1)
            zeros = unpack_rows(zeros, bits)[:rows].to(torch.int16) - middle
    weight = _integers(checkpoint, name, codes, scales, zeros, bits)
    return sorted_by_group(weight, checkpoint, f"{name}.weight_g_idx")


def _integers(
    checkpoint: Checkpoint,
    name: str,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
) -> IntegerWeight:
    """Make a weight of codes [out, in].

    scales, zeros: one for the whole layer, one for each output, or one for each group of inputs of
    an output. The zeros are signed; None means 0.
    """
    rows, columns = codes.shape
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, 1)
    scales = scales.reshape(len(scales), -1)
    groups = scales.shape[1]
    if len(scales) != rows or columns % groups:
        raise checkpoint.error(
            f"{name}.weight_scale",
            f"has shape {list(scales.shape)}, which fits no layer of {rows} x {columns}",
        )
    if zeros is None:
        zeros = torch.zeros(1, dtype=torch.int8)
    zeros = _unsigned(zeros.reshape(-1, groups) if zeros.numel() > 1 else zeros, bits)
    return IntegerWeight(codes, scales, zeros.expand(rows, groups), bits, columns // groups)


def _unsigned(signed: Tensor, bits: int) -> Tensor:
    return (signed.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
