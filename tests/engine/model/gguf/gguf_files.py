"""Tiny GGUF files, written with the package gguf by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "granite": "granite",
}  # fmt: skip
"""llama.cpp's architectures by transformers' model types."""
MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "attention_multiplier": "attention.scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def write_gguf(source: Path, file: Path, kind: str = "F32", *, blocks: bool = False) -> Path:
    """Write a model as a GGUF file, and its dequantized weights as an ordinary model beside it.

    kind: ggml's type of matrices whose rows its blocks divide; others are F16. blocks: whether
    matrices are random blocks of that type, because gguf cannot quantize to it. Returns the
    directory of the ordinary model.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    _add_settings(writer, architecture, config)
    _add_tokenizer(writer, config["vocab_size"])
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    dequantized = {}
    tensors = load_file(source / "model.safetensors")
    for published, tensor in tensors.items():
        name = names.get_name(published, try_suffixes=(".weight", ".bias"))
        name = "output.weight" if published == "lm_head.weight" else name
        assert name, published
        stored, type = _as_stored(architecture, published, tensor, config), _type(tensor, kind)
        if blocks and type.name == kind:
            data = random_blocks(stored, type)
        else:
            data = quants.quantize(stored.float().numpy(), type)
        writer.add_tensor(name, data, raw_dtype=type)
        exact = torch.from_numpy(quants.dequantize(data, type)).view(stored.shape)
        dequantized[published] = _as_published(architecture, published, exact, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = file.with_suffix("")
    shutil.copytree(source, folder)
    save_file(dequantized, folder / "model.safetensors", {"format": "pt"})
    return folder


def _add_settings(writer: Any, architecture: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    for setting, key in MULTIPLIERS.items():
        if config.get(setting) is not None:
            writer.add_float32(f"{architecture}.{key}", config[setting])
    if config.get("sliding_window") and config["model_type"] != "mistral":
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma3_text":
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        local = ropes["sliding_attention"]["rope_theta"]
        writer.add_float32("gemma3.rope.freq_base_swa", local)


def _add_tokenizer(writer: Any, size: int) -> None:
    """Add a byte-level tokenizer with two merges. The first token ends an answer."""
    letters = [chr(ord("a") + index) for index in range(26)]
    tokens = ["<|endoftext|>", "<|user|>", *letters, "Ġ", "he", "Ġhe"]
    tokens += [f"[unused{index}]" for index in range(size - len(tokens))]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (size - 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")


def _type(tensor: Tensor, kind: str) -> GGMLQuantizationType:
    if tensor.dim() == 1:
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[kind]
    fits = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if fits else GGMLQuantizationType.F16


def random_blocks(tensor: Tensor, type: GGMLQuantizationType) -> Any:
    """Return random blocks whose scales are those of weights."""
    elements, size = gguf.GGML_QUANT_SIZES[type]
    generator = torch.Generator().manual_seed(tensor.numel())
    shape = (tensor.shape[0], tensor.shape[1] // elements, size)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    starts = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}
    scale = torch.tensor([0.0005], dtype=torch.float16).view(torch.uint8)
    for start in starts[type.name]:
        data[..., start : start + 2] = scale
    return data.flatten(1).numpy()


def _as_stored(architecture: str, name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    heads = _heads(architecture, name, config)
    if heads:
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor + 1 if _has_offset(architecture, name) else tensor


def _as_published(architecture: str, name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    heads = _heads(architecture, name, config)
    if heads:
        tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return tensor - 1 if _has_offset(architecture, name) else tensor


def _heads(architecture: str, name: str, config: dict[str, Any]) -> int:
    """Return the number of heads of q or k where llama.cpp's converter permutes their rows."""
    if architecture not in ("llama", "granite"):
        return 0
    if "q_proj" in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if "k_proj" in name else 0


def _has_offset(architecture: str, name: str) -> bool:
    return architecture.startswith("gemma") and name.endswith("norm.weight")
