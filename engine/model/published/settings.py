"""A model's published settings, in one form for all families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.attention.call import UnsupportedModelError
from engine.model.families import FAMILIES, RMS, Family
from engine.model.spec import DecoderSpec, LatentSizes, LayerSpec, QueryScaling, published_ropes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
ACTIVATION_NAMES = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act")
MLP_WIDTH_NAMES = ("intermediate_size", "ffn_dim", "n_inner")
DENSE_COUNT_NAMES = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
TORCH_LAYER_NORM_EPS = 1e-5
DEFAULT_ACTIVATION = "silu"
"""Of models whose config.json names none (LFM2)."""


def read_spec(config: PreTrainedConfig, max_length: int, num_parts: int = 1) -> DecoderSpec:
    """Return the spec of a config's model. max_length: maximum tokens of a sequence.

    Raises UnsupportedModelError if FAMILIES has no such model type or the config uses a setting
    that the decoder does not support, and ConfigurationError if states cannot be split into
    `num_parts` equal parts.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModelError(f"model type {config.model_type} is not in the family table")
    given: Any = config
    _check_supported(given)
    if family.is_rms_by_config and given.rms_norm_eps is not None:
        family = replace(family, norm=RMS)
    num_heads = _num_heads(given)
    latent = _latent(given) if family.has_latents else None
    is_parallel = getattr(given, "use_parallel_residual", family.is_parallel)
    has_qk_norm = not family.qk_norm_is_optional or given.use_qk_norm
    norms = family.norms
    if is_parallel and family.parallel_shares_norm:
        norms = (norms[0], norms[1], "", norms[3])
    return DecoderSpec(
        model_type=config.model_type,
        family=family,
        config=config,
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        num_heads=num_heads,
        latent=latent,
        rotates_pairs=family.rotary == "pairs" and getattr(given, "rope_interleave", True),
        norm_eps=_first(given, EPS_NAMES) or TORCH_LAYER_NORM_EPS,
        activation=_first(given, ACTIVATION_NAMES) or DEFAULT_ACTIVATION,
        layers=_layers(given, family, latent, num_parts),
        ropes=published_ropes(given) if _has_rotary(given, family) else {},
        query_scaling=_query_scaling(given, max_length) if family.scales_queries else None,
        softcap=getattr(given, "attn_logit_softcapping", None),
        embedding_scale=(
            given.hidden_size**0.5
            if family.scales_embedding
            else getattr(given, "embedding_multiplier", 1.0)
        ),
        residual_scale=getattr(given, "residual_multiplier", 1.0),
        logit_scale=_logit_scale(given),
        logit_softcap=getattr(given, "final_logit_softcapping", None),
        is_tied=given.tie_word_embeddings,
        qk_norm=family.qk_norm if has_qk_norm else "",
        norms=norms,
        is_parallel=is_parallel,
        qkv_clip=getattr(given, "clip_qkv", None),
        max_length=max_length,
    )


def _check_supported(config: Any) -> None:
    """Raise UnsupportedModelError for settings that only rare members of a family use."""
    unsupported = {
        "its norms come after the residual adds": not getattr(config, "do_layer_norm_before", True),
        "its embedding is projected": (
            getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size
        ),
        "its q/k norms have separate weights for each head": getattr(config, "qk_layernorm", False),
        "it has cross-attention": getattr(config, "add_cross_attention", False),
        "its norms have no weights": not getattr(config, "layer_norm_elementwise_affine", True),
        "none of its layers has a sliding window": (
            config.model_type in ("cohere2", "cohere2_moe") and not config.sliding_window
        ),
        "its latent is no multiple of 16": (getattr(config, "kv_lora_rank", None) or 0) % 16 != 0,
        "it has no final norm": getattr(config, "_remove_final_layer_norm", False),
        "its tokens attend in both directions": (
            getattr(config, "use_bidirectional_attention", None) in (True, "all")
        ),
    }
    for reason, applies in unsupported.items():
        if applies:
            raise UnsupportedModelError(reason)


def _latent(config: Any) -> LatentSizes:
    return LatentSizes(
        rank=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        nope=config.qk_nope_head_dim,
        value=config.v_head_dim,
        query_rank=config.q_lora_rank,
    )


def _logit_scale(config: Any) -> float:
    scale = getattr(config, "logit_scale", 1.0) * getattr(config, "lm_head_multiplier", 1.0)
    return scale / getattr(config, "logits_scaling", 1.0)


def _query_scaling(config: Any, max_length: int) -> QueryScaling | None:
    rope = config.rope_parameters
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScaling(beta, original) if beta and max_length > original else None


def _layers(
    config: Any, family: Family, latent: LatentSizes | None, num_parts: int
) -> tuple[LayerSpec, ...]:
    """Return the specs of all layers. latent: None if none attends over latents.

    Raises ConfigurationError if states cannot be split into `num_parts` equal parts.
    """
    layers = tuple(
        _layer(_settings(config, index), family, latent, index)
        for index in range(config.num_hidden_layers)
    )
    if not family.state:
        return layers
    from core.states.layout import WITH_ATTENTION, layer_states

    given = {**config.to_dict(), "layer_types": config.layer_types}
    states = layer_states(given, num_parts)
    return tuple(
        replace(layer, state=state, has_attention=kind in WITH_ATTENTION)
        for layer, state, kind in zip(layers, states, config.layer_types, strict=True)
    )


def _settings(config: Any, index: int) -> Any:
    """Return the config with the settings of layer `index`, where layers have settings of their
    own."""
    return config.per_layer_config[index] if config.is_heterogeneous else config


def _layer(config: Any, family: Family, latent: LatentSizes | None, index: int) -> LayerSpec:
    """Return the spec of layer `index`. config: that of `_settings`."""
    window = getattr(config, "sliding_window", None) or None
    is_full = family.windows == "by layer" and config.layer_types[index] != "sliding_attention"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // _num_heads(config)
    if latent is not None:
        head_dim = latent.rope
    source = _source(config, index)
    has_experts = _has_experts(config, family, index)
    return LayerSpec(
        window=None if family.windows == "none" or is_full else window,
        scale=_scale(config, family, head_dim, index),
        rope=_rope(config, family, index),
        has_experts=has_experts,
        num_kv_heads=_num_kv_heads(config, family),
        head_dim=head_dim,
        mlp_width=_mlp_width(config, has_experts=has_experts, is_shared=source is not None),
        source=source,
        shared_dim=_shared_dim(config, head_dim, index),
    )


def _source(config: Any, index: int) -> int | None:
    """Return the layer whose K and V layer `index` reads: the last of its type that has own ones;
    None if it has own ones itself."""
    first_shared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    if index < first_shared:
        return None
    own = config.layer_types[:first_shared]
    return max(i for i, kind in enumerate(own) if kind == config.layer_types[index])


def _shared_dim(config: Any, head_dim: int, index: int) -> int:
    """Return `LayerSpec.shared_dim`.

    Models in which layers may read the K and V of others keep both: no such model folds K.
    """
    is_full = getattr(config, "attention_k_eq_v", False) and (
        config.layer_types[index] == "full_attention"
    )
    if not is_full or getattr(config, "num_kv_shared_layers", None):
        return 0
    rope = published_ropes(config)["full_attention"]
    return head_dim - 2 * int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)


def _mlp_width(config: Any, *, has_experts: bool, is_shared: bool) -> int:
    width = _first(config, MLP_WIDTH_NAMES) or 4 * config.hidden_size
    if not has_experts and getattr(config, "prefix_dense_intermediate_size", None):
        return config.prefix_dense_intermediate_size
    if getattr(config, "num_local_experts", None) == 0:  # Granite 4 without a mixture
        return getattr(config, "shared_intermediate_size", width)
    if is_shared and getattr(config, "use_double_wide_mlp", False):
        return 2 * width
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    # LFM2: of a gated MLP that has as many weights as an MLP of this width without a gate
    factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _num_heads(config: Any) -> int:
    """Return the heads of attention; of a model without any, those of its states, or channels."""
    return _first(config, ("num_attention_heads", "num_heads")) or config.hidden_size


def _num_kv_heads(config: Any, family: Family) -> int:
    if family.has_latents:
        return 1
    num_heads = None if family.qkv_by_head else getattr(config, "num_key_value_heads", None)
    return num_heads or _num_heads(config)


def _scale(config: Any, family: Family, head_dim: int, index: int) -> float:
    if family.has_latents:
        return _latent_scale(config)
    if family.is_gemma4:
        return 1.0
    multiplier = getattr(config, "attention_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    scale = (getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5
    if not getattr(config, "scale_attn_weights", True):
        scale = 1.0
    divides = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    return scale / (index + 1) if divides else scale


def _latent_scale(config: Any) -> float:
    """Return the scale of latent attention, which YaRN makes larger for long contexts."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    factor, all_dims = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope["rope_type"] == "default" or not all_dims or factor <= 1:
        return scale
    return scale * (0.1 * all_dims * math.log(factor) + 1.0) ** 2


def _rope(config: Any, family: Family, index: int) -> str | None:
    if not _has_rotary(config, family):
        return None
    layer_types = getattr(config, "layer_types", None) or []
    # `no_rope_layers` is SmolLM3's; despite its name, a nonzero entry means that the layer rotates.
    rotates = getattr(config, "no_rope_layers", None)
    if rotates and not rotates[index]:
        return None
    if family.rotates_only_windows and getattr(config, "sliding_window", None) is not None:
        is_full = layer_types[index] != "sliding_attention"
        if is_full and not _is_rotated_prefix(config, index):
            return None
    return (
        layer_types[index] if layer_types and layer_types[index] in published_ropes(config) else ""
    )


def _is_rotated_prefix(config: Any, index: int) -> bool:
    """Whether layer `index` is one of Cohere 2's first dense layers, of which all may rotate."""
    pattern = getattr(config, "prefix_dense_sliding_window_pattern", None)
    return pattern == 1 and config.mlp_layer_types[index] == "dense"


def _has_rotary(config: Any, family: Family) -> bool:
    """Granite 4 may leave positions to the layers with a state."""
    is_left_out = family.state and getattr(config, "position_embedding_type", "rope") != "rope"
    return family.rotary != "none" and not is_left_out


def _has_experts(config: Any, family: Family, index: int) -> bool:
    if family.experts is None:
        return False
    if family.has_one_part:
        return config.layer_types[index] == "moe"
    if getattr(config, "num_local_experts", None) == 0:
        return False
    if not getattr(config, "enable_moe_block", True):
        return False
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:
        return kinds[index] == "sparse"
    first = _first(config, DENSE_COUNT_NAMES) or 0
    last = getattr(config, "moe_layer_end_index", index)
    step = _first(config, ("decoder_sparse_step", "moe_layer_interval")) or 1
    is_dense = index in (getattr(config, "mlp_only_layers", None) or ())
    return first <= index <= last and (index + 1) % step == 0 and not is_dense


def of_layer(setting: Any, index: int) -> Any:
    """Return a setting of layer `index`: the config has one for all layers, or a list."""
    return setting[index] if isinstance(setting, list) else setting


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first of these settings that is not None, or None."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def quantization_config(config: Any) -> Mapping[str, Any] | None:
    """Return how a model's config says that the weights are quantized; None if they are not."""
    given = getattr(config, "quantization_config", None)
    return given if given is None or isinstance(given, dict) else given.to_dict()


def quantization_method(config: PreTrainedConfig) -> str | None:
    """Return the `quant_method` of a model's config; None if its weights are not quantized."""
    given = quantization_config(config)
    return None if given is None else str(given.get("quant_method", "unknown"))
