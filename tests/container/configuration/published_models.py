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
LONG_CONTEXTS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Qwen3.5-9B": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
            "head_dim": 256, "vocab_size": 248320, "full_attention_interval": 4,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
        },
    },
    "LFM2-8B-A1B": {
        "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 65536, "num_experts": 32, "moe_intermediate_size": 1792,
        "num_experts_per_tok": 4, "full_attn_idxs": [2, 6, 10, 14, 18, 21],
        "max_position_embeddings": 128000,
    },
    "Granite 4.0 H Small": {
        "model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 100352, "num_local_experts": 72, "num_experts_per_tok": 10,
        "shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_state": 128,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What a long context costs them is documented."""
