"""The table of architectures: how a GGUF file's metadata become the settings of config.json.

To add an architecture, add a row to ARCHITECTURES. Where llama.cpp fixes a number that transformers
reads from config.json, the row's function has it. ggml's repository describes the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.gguf.metadata import Metadata

Settings = dict[str, Any]
GEMMA_2_27B_LAYERS, GEMMA_3_27B_LAYERS = 46, 62
"""Layers of the only Gemmas whose attention is not scaled by the size of a head."""
GEMMA_WINDOW_THETA = 10_000.0
GEMMA_3_PATTERN = 6
"""Every sixth layer has no window."""
EXPERT_COUNT = "{arch}.expert_count"
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor by whose elements the frequencies are divided (Llama 3)."""
YARN = (
    ("beta_fast", "yarn_beta_fast"),
    ("beta_slow", "yarn_beta_slow"),
    ("attention_factor", "yarn_attn_factor"),
)
"""Settings of YaRN and their keys."""
OUTSIDE_LAYERS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become settings."""


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str
    """transformers' model type, and the key of the family's row in `engine.model.families`."""
    settings: Callable[[Metadata], Settings] = lambda metadata: {}
    """Returns what differs from `common_settings`."""
    renames: tuple[tuple[str, str], ...] = ()
    """Names of tensors in its layers: (in its files, the usual one)."""
    rotates_pairs: bool = False
    """Whether q and k are stored as llama.cpp rotates them: neighbouring rows rotate together."""


def _llama(metadata: Metadata) -> Settings:
    return {
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in metadata.tensors,
    }


def _granite(metadata: Metadata) -> Settings:
    if not metadata.get("{arch}.rope.scaling.finetuned", True):
        raise metadata.error(
            "its layers have no rotary embedding; serve the model's *.safetensors instead"
        )
    head_dim = _head_dim(metadata)
    return {
        **_llama(metadata),
        "embedding_multiplier": metadata.get("{arch}.embedding_scale", 1.0),
        "residual_multiplier": metadata.get("{arch}.residual_scale", 1.0),
        "logits_scaling": metadata.get("{arch}.logit_scale", 1.0),
        "attention_multiplier": metadata.get("{arch}.attention.scale", head_dim**-0.5),
    }


def _phi3(metadata: Metadata) -> Settings:
    length = metadata.required("{arch}.context_length")
    original = metadata.get("{arch}.rope.scaling.original_context_length", length)
    rope = _rope(metadata)
    if "rope_factors_long.weight" in metadata.tensors:
        rope["rope_type"] = "longrope"
        rope["long_factor"] = metadata.values("rope_factors_long.weight")
        rope["short_factor"] = metadata.values("rope_factors_short.weight")
        rope["original_max_position_embeddings"] = original
        factor = metadata.get("{arch}.rope.scaling.attn_factor")
        if factor is not None:
            rope["attention_factor"] = factor
    head_dim = _head_dim(metadata)
    rotated = metadata.get("{arch}.rope.dimension_count", head_dim)
    rope["partial_rotary_factor"] = rotated / head_dim
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
        "sliding_window": metadata.get("{arch}.attention.sliding_window") or None,
    }


def _gemma2(metadata: Metadata) -> Settings:
    return {
        **_gemma_scale(metadata, GEMMA_2_27B_LAYERS),
        "sliding_window": metadata.required("{arch}.attention.sliding_window"),
        "attn_logit_softcapping": metadata.get("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("{arch}.final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> Settings:
    theta = metadata.get("{arch}.rope.freq_base_swa", GEMMA_WINDOW_THETA)
    pattern = metadata.get("{arch}.attention.sliding_window_pattern", GEMMA_3_PATTERN)
    num_layers = metadata.required("{arch}.block_count")
    window = metadata.get("{arch}.attention.sliding_window") or None
    if window is None:
        pattern = [False] * num_layers
    elif not isinstance(pattern, list):
        pattern = [(index + 1) % pattern != 0 for index in range(num_layers)]
    return {
        **_gemma_scale(metadata, GEMMA_3_27B_LAYERS),
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if has_window else "full_attention" for has_window in pattern
        ],
        "rope_parameters": {
            "full_attention": _rope(metadata, default_theta=1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("{arch}.final_logit_softcapping"),
    }


def _mixtral(metadata: Metadata) -> Settings:
    return {
        "num_local_experts": metadata.required(EXPERT_COUNT),
        "num_experts_per_tok": metadata.required("{arch}.expert_used_count"),
        "sliding_window": None,
    }


def _qwen3moe(metadata: Metadata) -> Settings:
    return {
        "num_experts": metadata.required(EXPERT_COUNT),
        "num_experts_per_tok": metadata.required("{arch}.expert_used_count"),
        "moe_intermediate_size": metadata.required("{arch}.expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _granitemoe(metadata: Metadata) -> Settings:
    return {**_granite(metadata), **_mixtral(metadata)}


def _gpt_oss(metadata: Metadata) -> Settings:
    return {
        **_mixtral(metadata),
        "intermediate_size": metadata.required("{arch}.expert_feed_forward_length"),
        "sliding_window": metadata.required("{arch}.attention.sliding_window"),
        # The published model's frequencies; llama.cpp rounds where they begin to be scaled.
        "rope_parameters": {**_rope(metadata), "truncate": False},
    }


def _gemma_scale(metadata: Metadata, layers_of_27b: int) -> Settings:
    """Return the number whose root the dot products are divided by; no file has it."""
    if metadata.required("{arch}.block_count") != layers_of_27b:
        return {"query_pre_attn_scalar": _head_dim(metadata)}
    width = metadata.required("{arch}.embedding_length")
    return {"query_pre_attn_scalar": width // metadata.required("{arch}.attention.head_count")}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, rotates_pairs=True),  # Mistral's, too
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", _gemma2),
    "gemma3": Architecture("gemma3_text", _gemma3),
    "phi3": Architecture("phi3", _phi3),
    "granite": Architecture("granite", _granite, rotates_pairs=True),
}
"""By `general.architecture`."""
MIXTURES: Mapping[str, Architecture] = {
    "llama": Architecture("mixtral", _mixtral, rotates_pairs=True),
    "qwen3moe": Architecture("qwen3_moe", _qwen3moe),
    "granitemoe": Architecture("granitemoe", _granitemoe, rotates_pairs=True),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, renames=(("post_attention_norm", "ffn_norm"),)),
}
"""The same of files with experts."""


def find_architecture(metadata: Metadata) -> Architecture:
    """Raises ConfigurationError for an unknown architecture."""
    has_experts = metadata.get(EXPERT_COUNT, 0) > 0
    found = (MIXTURES if has_experts else ARCHITECTURES).get(metadata.architecture)
    if found is None:
        raise metadata.error(
            f"the architecture {metadata.architecture}{' with experts' if has_experts else ''} "
            f"cannot be read from a GGUF file, only {', '.join(ARCHITECTURES)}, and with experts "
            f"{', '.join(MIXTURES)}; serve the model's *.safetensors instead"
        )
    return found


def model_settings(metadata: Metadata, architecture: Architecture) -> Settings:
    """Return the settings of config.json. Raises ConfigurationError if the file lacks one."""
    return {**_common(metadata), **architecture.settings(metadata)}


def _common(metadata: Metadata) -> Settings:
    embedding = metadata.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.error("it has no tensor 'token_embd.weight': download it again")
    heads = _one(metadata, "{arch}.attention.head_count")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.required("{arch}.embedding_length"),
        "num_hidden_layers": metadata.required("{arch}.block_count"),
        "intermediate_size": _one(metadata, "{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(metadata, "{arch}.attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata),
        "rms_norm_eps": metadata.required("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.required("{arch}.context_length"),
        "rope_parameters": _rope(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
    }


def _one(metadata: Metadata, key: str, default: int | None = None) -> int:
    """Return a number that all layers must share, of which a file may list one for each layer."""
    value = metadata.required(key) if default is None else metadata.get(key, default)
    numbers = set(value) if isinstance(value, list) else {value}
    if len(numbers) > 1:
        raise metadata.error(f"{key.format(arch=metadata.architecture)} differs between layers")
    return numbers.pop()


def _head_dim(metadata: Metadata) -> int:
    width = metadata.required("{arch}.embedding_length")
    heads = _one(metadata, "{arch}.attention.head_count")
    key_dim = metadata.get("{arch}.attention.key_length", width // heads)
    if metadata.get("{arch}.attention.value_length", key_dim) != key_dim:
        raise metadata.error("keys and values have heads of different sizes")
    return key_dim


def _rope(metadata: Metadata, default_theta: float = 10_000.0) -> Settings:
    """Return transformers' rope_parameters."""
    rope: Settings = {
        "rope_type": "default",
        "rope_theta": metadata.get("{arch}.rope.freq_base", default_theta),
    }
    length = metadata.required("{arch}.context_length")
    if ROPE_FACTORS in metadata.tensors:
        factors = metadata.values(ROPE_FACTORS)
        return {
            **rope,
            "rope_type": "longrope",  # the variant that takes factors as they are
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    # A file may name a factor alone, older ones by another key; 0 and 1 stand for none.
    scaling = metadata.get("{arch}.rope.scaling.type", "linear")
    old_factor = metadata.get("{arch}.rope.scale_linear", 1.0)
    factor = metadata.get("{arch}.rope.scaling.factor", old_factor) or 1.0
    if scaling == "linear":
        return rope if factor == 1.0 else {**rope, "rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        original = metadata.get("{arch}.rope.scaling.original_context_length", length)
        given = {setting: metadata.get(f"{{arch}}.rope.scaling.{key}") for setting, key in YARN}
        return {
            **rope,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **{setting: value for setting, value in given.items() if value is not None},
        }
    if scaling not in ("none", "longrope"):
        raise metadata.error(f"rope.scaling.type={scaling} is unknown; none, linear and yarn are")
    return rope
