"""Sizes of published models, as their config.json gives them, for `longshore plan`."""

from __future__ import annotations

from typing import Any

DEEPSEEK = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"},
    },
    "Gemma 3 27B": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504,
            "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 128, "sliding_window": 1024,
        },
    },
    "Gemma 4 31B": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504,
            "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
            "attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262144,
        },
    },
    "Ministral 8B": {
        "model_type": "ministral", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131072, "sliding_window": 32768,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9,
        "max_position_embeddings": 131072,
    },
    "DeepSeek V3": {
        **DEEPSEEK, "model_type": "deepseek_v3", "num_attention_heads": 128,
        "vocab_size": 129280, "n_routed_experts": 256, "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
    },
    "Kimi K2": {
        **DEEPSEEK, "model_type": "kimi_k2", "num_attention_heads": 64, "vocab_size": 163840,
        "n_routed_experts": 384, "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    },
}  # fmt: skip
