"""Model shapes to benchmark, from their published config.json, and their memory traffic.

Fields with transformers' defaults are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

LLAMA_2_7B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
LLAMA_3_1_8B: Config = LLAMA_2_7B | {
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3_0_6B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
SHAPES = {"llama-2-7b": LLAMA_2_7B, "llama-3.1-8b": LLAMA_3_1_8B, "qwen3-0.6b": QWEN3_0_6B}
DRY_SHAPE: Config = LLAMA_2_7B | {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def write_config(config: Config, folder: Path) -> None:
    """Write config.json, which is all that a model directory needs for option.load_format=dummy."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def kv_bytes_per_token(config: Config, itemsize: int) -> int:
    """Return the bytes of one token's K and V in all layers."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * itemsize


def decode_bytes(config: Config, weights_bytes: int, num_kv_tokens: float, itemsize: int) -> float:
    """Return the bytes that a decode step of a dense model reads: all weights once, and all K/V.

    The input embedding is left out, as only a few of its rows are read, unless the output layer
    shares it. Activations and the written K/V are left out too: they are under one percent.
    """
    lookup = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
    kv_bytes = num_kv_tokens * kv_bytes_per_token(config, itemsize)
    return weights_bytes - lookup * itemsize + kv_bytes
