"""Tiny models that take images, of which only the language model is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from tests.engine.tiny_models import DELTA_NET, GROUPS, LATENTS, OWN, SHARED_EXPERT, VOCABULARY

TEXT: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "bos_token_id": 1,
    "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 128, "sliding_window": 8,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2,
} | GROUPS  # fmt: skip
VISION: dict[str, object] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "depth": 1, "num_heads": 2, "out_hidden_size": 32, "head_dim": 8, "pos_emb_height": 4,
    "pos_emb_width": 4, "num_key_value_heads": 2,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "partial_rotary_factor": 0.75, "mrope_interleaved": True,
                            "mrope_section": [1, 1, 1]}}  # fmt: skip
"""Some dims rotate, by time, row and column."""

WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k25": ("deepseek_v3", LATENTS),
    "llava": ("llama", {}),
    "llava_next": ("llama", TIED),
    "llava_onevision": ("qwen2", {}),
    "aya_vision": ("cohere2", TIED),
    "qwen3_5": ("qwen3_5_text", DELTA_NET | AXES),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_NET | AXES | SHARED_EXPERT),
    "lfm2_vl": ("lfm2", OWN["lfm2"] | TIED),
}
"""By model type: the family of the language model, and settings of its config."""


def save_wrapped_model(model_type: str, folder: Path) -> Path:
    """Write the model, with its tensors under their published names; return its folder."""
    path = folder / model_type
    if path.exists():
        return path
    config = AutoConfig.for_model(model_type)
    _, changes = WRAPPED[model_type]
    text = _small(config.text_config, TEXT | changes)
    vision = _small(config.vision_config, VISION)
    is_tied = changes.get("tie_word_embeddings", False)
    config = type(config)(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() >= 2:
                tensor.normal_(0, 1.4 / tensor.shape[-1] ** 0.5)
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.3 if "bias" in name else 0.2)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path)
    if model_type == "kimi_k25":  # names as published, which transformers reads but does not write
        file = path / "model.safetensors"
        tensors = load_file(file).items()
        published = {name.replace(".model.blocks.", ".model.layers."): t for name, t in tensors}
        save_file(published, file, {"format": "pt"})
    if model_type == "qwen3_5_moe":  # all experts in one tensor, as published
        save_file(model.state_dict(), path / "model.safetensors", {"format": "pt"})
    return path


def _small(config: PreTrainedConfig, sizes: dict[str, object]) -> dict[str, Any]:
    """Return a config's settings with the sizes that it knows, and without its lists by layer."""
    lists = ("layer_types", "mlp_layer_types", "full_attn_idxs")
    known = {name: value for name, value in config.to_dict().items() if name not in lists}
    return known | {name: value for name, value in sizes.items() if hasattr(config, name)}
