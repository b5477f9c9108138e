"""Resolves options for a small model that has no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from core.configuration.options import make_options
from engine.loading.model_source import ModelSource
from engine.resolve import Resolved, resolve


def resolved(
    device: str = "cpu",
    num_ranks: int = 1,
    not_packed: str = "",
    config: Any = None,
    **options: Any,
) -> Resolved:
    """Return what options mean for a Llama of 128 positions, or for another config, in fp32."""
    source = ModelSource(
        model_dir=Path("model"),
        config=config or LlamaConfig(max_position_embeddings=128),
        dtype=torch.float32,
        device=torch.device(device),
        is_dummy=True,
    )
    return resolve(make_options(options), source, num_ranks, not_packed=not_packed)
