"""Helpers for the readers of several formats: FP8 scales, and inputs sorted by group."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.quantization.weights import Float8Weight, IntegerWeight, PermutedWeight

DEFAULT_BLOCK = (128, 128)
"""Outputs and inputs that share an FP8 scale."""


def float8_weight(
    codes: Tensor, scales: Tensor, block: tuple[int, ...], checkpoint: Checkpoint, name: str
) -> Float8Weight:
    """Make a weight of codes [out, in] and scales for the layer, for each output, or for blocks.

    block: the outputs and the inputs of a block. name: the name of the scales in the checkpoint,
    for errors. Raises ConfigurationError for scales of another shape.
    """
    rows, columns = codes.shape
    scales = scales.float()
    if scales.numel() == 1:
        return Float8Weight(codes, scales.reshape(1, 1).expand(rows, 1), columns)
    if scales.shape in ((rows,), (rows, 1)):
        return Float8Weight(codes, scales.reshape(rows, 1), columns)
    if scales.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise checkpoint.error(
            name, f"has shape {list(scales.shape)}, which fits no layer of {rows} x {columns}"
        )
    return Float8Weight(codes, scales.repeat_interleave(block[0], 0)[:rows], block[1])


def sorted_by_group(
    weight: IntegerWeight, checkpoint: Checkpoint, name: str
) -> IntegerWeight | PermutedWeight:
    """Sort the columns so that the inputs of each group are neighbours, as the weight needs them.

    name: the name of the tensor [in] with the group of each input (GPTQ's g_idx). If there is none,
    the inputs are sorted already. Raises ConfigurationError for groups of another size.
    """
    if name not in checkpoint:
        return weight
    groups, size = checkpoint.take_stored(name).long(), weight.group_size
    counts = torch.bincount(groups, minlength=-(-len(groups) // size))
    if (counts != size).any():
        raise checkpoint.error(name, f"does not give each group {size} inputs")
    if bool((groups[1:] >= groups[:-1]).all()):
        return weight
    order = groups.argsort(stable=True)
    codes = weight.codes[:, order]
    return PermutedWeight(weight.with_tensors(codes, weight.scales, weight.zeros), order)
