"""Tiny random models of many architectures, written to a folder in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 128, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 0,
         "pad_token_id": 0}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128,
        "bos_token_id": 1, "eos_token_id": 0}  # fmt: skip
WINDOW = {"sliding_window": 8}
UNTIED = {"tie_word_embeddings": False}
"""With tied embeddings a random model repeats its newest token forever."""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
          "norm_topk_prob": True, "routed_scaling_factor": 1.7,
          "first_k_dense_replace": 1}  # fmt: skip
DEEPSEEK_EXPERTS = GROUPS | {"n_routed_experts": 8, "n_shared_experts": 2,
                             "moe_intermediate_size": 16}  # fmt: skip
HALF_ROTATES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                    "partial_rotary_factor": 0.5}}  # fmt: skip
LATENTS = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
           "v_head_dim": 12, "num_key_value_heads": 4}  # fmt: skip
WIDE_LATENTS = {"hidden_size": 128, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.7,
        "original_max_position_embeddings": 16, "mscale_all_dim": 1.0}  # fmt: skip
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FOUR_LAYERS = {"num_hidden_layers": 4}
"""One layer of each kind, for models where every fourth layer differs."""
DELTA_NET = {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
             "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
             "linear_value_head_dim": 16}  # fmt: skip
WIDE_DELTA_NET = {"hidden_size": 128, "head_dim": 128, "linear_key_head_dim": 16}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
STATES_ALONE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3,
                "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 0,
                "pad_token_id": 0}  # fmt: skip
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
               "attention_multiplier": 0.4}  # fmt: skip
FALCON_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.8, 1.3],
    "ssm_multipliers": [1.1, 0.9, 0.8, 1.2, 0.7],
}  # fmt: skip
GEMMA4 = SMALL | WINDOW | {"global_head_dim": 32, "num_global_key_value_heads": 1,
                           "attention_k_eq_v": True, "final_logit_softcapping": 30.0}  # fmt: skip
"""Gemma 4's 31B: two sizes of heads, and K folded into V."""
INPUTS = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 12}
SHARED = {"num_hidden_layers": 7, "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
                          *["sliding_attention", "full_attention"] * 2]}  # fmt: skip
"""As in Gemma 4's E2B, the last layers read what others keep."""
BESIDE_MLP = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
              "moe_intermediate_size": 16}  # fmt: skip
ONE_KIND_OF_HEAD = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}

OWN: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL | WINDOW,
    "ministral": SMALL | WINDOW,
    "ministral3": SMALL | WINDOW | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    "qwen2": SMALL | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "smollm3": SMALL | FOUR_LAYERS,
    "seed_oss": SMALL,
    "granite": SMALL | MULTIPLIERS,
    "qwen3": SMALL,
    "phi3": SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                         "partial_rotary_factor": 0.75}},
    "gemma": SMALL,
    "gemma2": SMALL | WINDOW | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": SMALL | WINDOW | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "gemma4_text": GEMMA4 | INPUTS | SHARED | BESIDE_MLP,
    "gemma4_unified_text": GEMMA4
    | FOUR_LAYERS
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo2": SMALL,
    "olmo3": SMALL | WINDOW | FOUR_LAYERS,
    "exaone4": SMALL | WINDOW | FOUR_LAYERS,
    "helium": SMALL,
    "ernie4_5": SMALL,
    "glm": SMALL,
    "glm4": SMALL,
    "hunyuan_v1_dense": SMALL | {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0,
                                                     "rope_theta": 10000.0, "alpha": 1000.0}},
    "arcee": SMALL,
    "apertus": SMALL,
    "nemotron": SMALL,
    "starcoder2": SMALL | WINDOW,
    "stablelm": SMALL | {"use_qkv_bias": True},
    "cohere": SMALL | {"use_qk_norm": True},
    "cohere2": SMALL | WINDOW | FOUR_LAYERS,
    "cohere2_moe": SMALL
    | WINDOW
    | FOUR_LAYERS
    | {
        "num_experts": 4,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 40,
        "sliding_window_pattern": 3,
    },
    "gpt2": GPT2,
    "gpt_neox": ONE_KIND_OF_HEAD | {"rotary_pct": 0.5},
    "opt": ONE_KIND_OF_HEAD | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": SMALL | LOCAL_EXPERTS,
    "qwen2_moe": SMALL
    | WINDOW
    | EXPERTS
    | {
        "use_sliding_window": True,
        "max_window_layers": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": SMALL | EXPERTS | {"norm_topk_prob": True},
    "olmoe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0},
    "granitemoe": SMALL | LOCAL_EXPERTS | MULTIPLIERS,
    "mellum": SMALL
    | WINDOW
    | EXPERTS
    | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "gpt_oss": SMALL | WINDOW | LOCAL_EXPERTS | {"intermediate_size": 64},
    "phi": SMALL,
    "phimoe": SMALL | WINDOW | LOCAL_EXPERTS | {"router_jitter_noise": 0.2},
    "glm4_moe": SMALL | DEEPSEEK_EXPERTS | {"use_qk_norm": True},
    "dots1": SMALL | WINDOW | DEEPSEEK_EXPERTS | {"max_window_layers": 2},
    "solar_open": SMALL | DEEPSEEK_EXPERTS | {"first_k_dense_replace": 0},
    "exaone_moe": SMALL | WINDOW | FOUR_LAYERS | EXPERTS | GROUPS | {"num_shared_experts": 2},
    "minimax_m2": SMALL | LOCAL_EXPERTS | HALF_ROTATES,
    "ernie4_5_moe": SMALL
    | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 2},
    "hunyuan_v1_moe": SMALL | {"num_experts": 4, "moe_topk": [2, 1, 2]},
    "hy_v3": SMALL | EXPERTS,
    "deepseek_v2": SMALL
    | LATENTS
    | DEEPSEEK_EXPERTS
    | {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "rope_parameters": YARN},
    "deepseek_v3": SMALL | LATENTS | DEEPSEEK_EXPERTS | {"rope_parameters": YARN},
    "glm4_moe_lite": SMALL | LATENTS | DEEPSEEK_EXPERTS | {"rms_norm_eps": 1e-3},
    "mistral4": SMALL
    | LATENTS
    | DEEPSEEK_EXPERTS
    | {
        "head_dim": 24,
        "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3},
    },
    "youtu": SMALL
    | LATENTS
    | {"q_lora_rank": None, "rope_interleave": False, "pad_token_id": None},
    "lfm2": SMALL
    | {
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.2,
        "conv_bias": True,
    },
    "lfm2_moe": SMALL
    | EXPERTS
    | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "granitemoehybrid": SMALL
    | MAMBA2
    | LOCAL_EXPERTS
    | MULTIPLIERS
    | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 24,
        "time_step_limit": (0.05, 0.5),
    },
    "bamba": SMALL | MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": SMALL
    | MAMBA2
    | FALCON_MULTIPLIERS
    | {"mamba_d_ssm": 48, "mamba_rms_norm": True, "time_step_limit": (0.05, 0.5)},
    "nemotron_h": SMALL
    | EXPERTS
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "time_step_min": 0.3,
        "n_routed_experts": 4,
        "moe_latent_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 1.7,
    },
    "mamba": STATES_ALONE,
    "falcon_mamba": STATES_ALONE | {"use_bias": True},
    "mamba2": STATES_ALONE | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "qwen3_next": SMALL | DELTA_NET | EXPERTS | SHARED_EXPERT | {"mlp_only_layers": [1]},
    "qwen3_5_text": SMALL | DELTA_NET,
    "qwen3_5_moe_text": SMALL | DELTA_NET | EXPERTS | SHARED_EXPERT,
}  # fmt: skip
"""A tiny model of every family of `engine.model.families`, with its optional features."""

FOREIGN: dict[str, dict[str, Any]] = {
    "biogpt": SMALL,
    "afmoe": SMALL | WINDOW | EXPERTS | {"num_dense_layers": 1},
}
"""Models that run packed with transformers' code."""

LIBRARY: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4,
              "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0},
    "gpt_neo": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128,
                "bos_token_id": 1, "eos_token_id": 0},
    "minimax": SMALL | {"num_local_experts": 2},
    "t5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
           "num_heads": 4, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0},
    "llama4_text": SMALL | {"num_local_experts": 2, "intermediate_size_mlp": 48,
                            "attention_chunk_size": 64, "pad_token_id": 0},
}  # fmt: skip
"""Models that the gate must reject.

bloom has ALiBi, gpt_neo attention classes of its own, minimax linear attention, t5 an encoder and
llama4_text attention in chunks.
"""

MODELS = OWN | FOREIGN | LIBRARY
KNOWN = {"llama", "mistral", *LIBRARY}
"""Models on whose exact answers other tests rely."""


def _wide(architecture: str) -> dict[str, object]:
    """Return settings whose head sizes and numbers of rotary dims the C++ kernels support."""
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    settings: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 128},
        "opt": {"hidden_size": 128, "word_embed_proj_dim": 128, "head_dim": 32},
        "gpt_neox": {"hidden_size": 256, "head_dim": 64, "rope_parameters": partial},
        "phi3": {"head_dim": 64, "rope_parameters": partial},
        "glm": {"head_dim": 64},
        "bamba": {"hidden_size": 128, "head_dim": 64},
        "glm4": {"head_dim": 64},
        "nemotron": {"head_dim": 64},
        "stablelm": {"hidden_size": 512, "head_dim": 128},
        "qwen3_next": WIDE_DELTA_NET,
        "qwen3_5_text": WIDE_DELTA_NET,
        "qwen3_5_moe_text": WIDE_DELTA_NET,
        "gemma4_text": {"hidden_size": 128, "head_dim": 32, "global_head_dim": 96},
        "gemma4_unified_text": {"hidden_size": 128, "head_dim": 32, "global_head_dim": 96},
        "deepseek_v2": WIDE_LATENTS,
        "deepseek_v3": WIDE_LATENTS,
        "glm4_moe_lite": WIDE_LATENTS,
        "youtu": WIDE_LATENTS,
        "mistral4": WIDE_LATENTS | {"qk_nope_head_dim": 64, "head_dim": 96},
    }
    return settings.get(architecture, {"hidden_size": 128, "head_dim": 32})


def decoder_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class that has the model of a decoder: Mistral 4 is only in the second."""
    is_known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_known else AutoModelForImageTextToText


def save_tiny_model(
    architecture: str,
    folder: Path,
    *,
    is_wide: bool = False,
    changes: Mapping[str, object] | None = None,
    name: str = "",
) -> Path:
    """Write the model unless it exists, with larger weights so that outputs are diverse.

    is_wide: with head sizes that the C++ kernels support. changes: settings to replace. name: of
    the folder; "": the architecture and the changes.
    """
    changes = changes or {}
    values = "".join(f"-{value}" for value in changes.values())
    path = folder / (name or (f"{architecture}-wide" if is_wide else f"{architecture}{values}"))
    if path.exists():
        return path
    settings = MODELS[architecture] | UNTIED | (_wide(architecture) if is_wide else {})
    config = CONFIG_MAPPING[architecture](**{**settings, **changes})
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else decoder_class(config)
    torch.manual_seed(7)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.dim() >= 2 and "norm" not in parameter and not parameter.endswith("_bias"):
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
            elif parameter.endswith("proj.bias"):  # initialized to 0
                weight.normal_(0, 0.2)
            elif architecture not in KNOWN:  # initially norms are 1 and biases 0
                weight.add_(torch.randn_like(weight), alpha=0.2)
        for buffer, factor in model.named_buffers():
            if buffer.endswith("layer_scalar"):
                factor.fill_(0.7)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path)
    return path
