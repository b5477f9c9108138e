"""The dequantized tensors of a GGUF file, as transformers' modules have them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from engine.model.families import FAMILIES, ExpertNames
from engine.model.gguf.stored import mapped_files, read_index

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)\.(weight|bias)")


def dense_state(model_dir: Path, num_layers: int, model_type: str) -> dict[str, Tensor]:
    """Return the tensors of the first layers and of what is outside of layers."""
    tensors = read_index(model_dir)
    files = mapped_files(model_dir, tensors)
    state = {
        tensor.name: tensor.dense(files[tensor.file])
        for tensor in tensors
        if tensor.layer is None or tensor.layer < num_layers
    }
    return with_merged_experts(state, FAMILIES[model_type].experts)


def with_merged_experts(state: dict[str, Tensor], names: ExpertNames | None) -> dict[str, Tensor]:
    """Replace the tensors of single experts by those of all experts, under `ExpertNames.merged`.

    names: the family's; None if it has no experts.
    """
    kept: dict[str, Tensor] = {}
    experts: dict[tuple[str, str], dict[str, dict[int, Tensor]]] = {}
    for name, tensor in state.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            kept[name] = tensor
        else:
            block, index, part, kind = found.groups()
            parts = experts.setdefault((block.removesuffix("experts"), kind), {})
            parts.setdefault(part, {})[int(index)] = tensor
    for (block, kind), parts in experts.items():
        assert names is not None, f"the model has no experts, but its files have {block}experts"
        stacked = {
            part: torch.stack([found[index] for index in range(len(found))])
            for part, found in parts.items()
        }
        gates, ups = stacked[names.gate], stacked[names.up]
        if names.is_interleaved:
            gate_up = torch.stack([gates, ups], 2).flatten(1, 2)
        else:
            gate_up = torch.cat([gates, ups], 1)
        for own, tensor in zip(names.merged, (gate_up, stacked[names.down]), strict=True):
            is_transposed = names.is_interleaved and kind == "weight"
            placed = tensor.transpose(1, 2).contiguous() if is_transposed else tensor
            kept[f"{block}{own}{'' if kind == 'weight' else '_bias'}"] = placed
    return kept
