"""Tiny random models of many architectures, written to a folder in fp32."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 128, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 0,
         "pad_token_id": 0}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128,
        "bos_token_id": 1, "eos_token_id": 0}  # fmt: skip
WINDOW = {"sliding_window": 8}
UNTIED = {"tie_word_embeddings": False}
"""With tied embeddings a random model repeats its newest token for ever."""

PACKED: dict[str, dict[str, object]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL,
    "mistral": SMALL | WINDOW,
    "gemma2": SMALL | WINDOW | UNTIED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gpt2": GPT2 | UNTIED,
    "opt": SMALL | UNTIED | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": SMALL | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": SMALL
    | WINDOW
    | {
        "use_sliding_window": True,
        "max_window_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                         "partial_rotary_factor": 0.75}},
}  # fmt: skip
"""What must run packed, each with its own trait: GQA, biases, norms on q and k, a window, softcap,
learned positions, sinks, a window that is in the mask alone, experts, q, k and v from one layer."""

LIBRARY: dict[str, dict[str, object]] = {
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4,
              "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0} | UNTIED,
    "gpt_neo": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128,
                "bos_token_id": 1, "eos_token_id": 0},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
              "state_size": 4, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0},
    "t5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
           "num_heads": 4, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0},
    "llama4_text": SMALL | {"num_local_experts": 2, "intermediate_size_mlp": 48,
                            "attention_chunk_size": 64, "pad_token_id": 0},
    "qwen3_next": SMALL | {"num_hidden_layers": 4, "linear_num_key_heads": 2,
                           "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                           "linear_value_head_dim": 8, "num_experts": 4,
                           "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                           "shared_expert_intermediate_size": 16},
}  # fmt: skip
"""What the gate must refuse: ALiBi, an attention class of its own, a state, an encoder, chunks."""


HEADS_OF_32 = {
    architecture: {
        "gpt2": {"n_embd": 128},
        "opt": {"hidden_size": 128, "word_embed_proj_dim": 128},
        "phi3": {
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        },
    }.get(architecture, {"head_dim": 32})
    for architecture in PACKED
}  # fmt: skip
"""What makes each a model that the C++ kernels compute, halves of what is rotated included."""


def save_tiny_model(architecture: str, folder: Path, *, is_wide: bool = False) -> Path:
    """Writes the model unless it is there; weights are spread so that outputs are diverse.

    is_wide: with HEADS_OF_32.
    """
    path = folder / (f"{architecture}-wide" if is_wide else architecture)
    if path.exists():
        return path
    settings = (PACKED | LIBRARY)[architecture] | (HEADS_OF_32[architecture] if is_wide else {})
    config = CONFIG_MAPPING[architecture](**settings)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(7)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "norm" not in name:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
            elif name.endswith("proj.bias"):  # all 0 until here
                weight.normal_(0, 0.2)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path)
    return path
