"""Reads from config.json what the layers of a decoder keep of a token, and its parameters.

Only JSON is read, without transformers. So a table here has the settings that config.json may lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.configuration.kv_layout import NO_ATTENTION, LayerShape
from core.states.layout import (
    KINDS,
    WITH_ATTENTION,
    LayerState,
    layer_states,
    layer_types,
)

Config = Mapping[str, Any]
"""The settings of a language model, completed by `text_settings`."""

_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
          "max_position_embeddings": 131072, "tie_word_embeddings": True}  # fmt: skip
_GEMMA4 = {**_GEMMA, "vocab_size": 262144, "sliding_window_pattern": 6, "global_head_dim": 512}
_QWEN = {"use_sliding_window": False, "max_window_layers": 28}
_MAMBA = {
    "expand": 2, "state_size": 16, "conv_kernel": 4, "time_step_rank": "auto",
    "tie_word_embeddings": True,
}  # fmt: skip
_MAMBA2 = {"mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_conv": 4}
_DELTA_NET = {"linear_conv_kernel_dim": 4, "full_attention_interval": 4}
_DEFAULTS: Mapping[str, Config] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4},
    "cohere2_moe": {"tie_word_embeddings": True, "sliding_window_pattern": 4,
                    "prefix_dense_sliding_window_pattern": 1},
    "dots1": {"max_window_layers": 62},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "exaone4": {"sliding_window_pattern": 4},
    "exaone_moe": {"sliding_window_pattern": 4},
    "falcon_h1": {"mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_state": 256,
                  "mamba_rms_norm": False, **_MAMBA2},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window_pattern": 2},
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "sliding_window_pattern": 6},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_oss": {"sliding_window_pattern": 2},
    "hy_v3": {"first_k_dense_replace": 1},
    "lfm2": {"conv_L_cache": 3, "tie_word_embeddings": True, "block_auto_adjust_ff_dim": True,
             "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
    "lfm2_moe": {"conv_L_cache": 3, "tie_word_embeddings": True, "num_dense_layers": 2},
    "falcon_mamba": _MAMBA,
    "mamba": _MAMBA,
    "mamba2": {
        "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "conv_kernel": 4,
    },
    "nemotron_h": {
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "head_dim": 128, "num_key_value_heads": 8,
    },
    "olmo3": {"sliding_window_pattern": 4},
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN,
    "granitemoehybrid": {"shared_intermediate_size": 1024, **_MAMBA2},
    "bamba": {"mamba_d_state": 256, **_MAMBA2},
    "qwen3_moe": _QWEN,
    "qwen3_next": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "smollm3": {"tie_word_embeddings": True, "use_sliding_window": False},
}  # fmt: skip
"""By model type, what transformers' config classes add to a config.json that lacks it."""
LATENT_TYPES = {
    "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "mistral4", "youtu",
}  # fmt: skip
"""Model types whose layers keep a latent, which all heads share, instead of K and V."""
LATENT_DIMS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
_COUNT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_DENSE_NAMES = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
_SHARED_NAMES = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def text_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a config.json's language model, with the defaults of its type.

    Whether embeddings are tied may stand beside the language model's settings.
    """
    given = config.get("text_config") or config
    defaults = _DEFAULTS.get(given.get("model_type", ""), {})
    tied = config.get("tie_word_embeddings")
    found = {**defaults, **({} if tied is None else {"tie_word_embeddings": tied}), **given}
    if found.get("model_type") == "nemotron_h":  # many files give no other number of layers
        found["num_hidden_layers"] = len(layer_types(found))
    return found


def layer_shapes(config: Config, num_kv_heads: int, head_dim: int) -> tuple[LayerShape, ...]:
    """Return what each layer keeps of a token, as the engine's `DecoderSpec.shapes`."""
    if config.get("model_type") in LATENT_TYPES:
        rank = config["kv_lora_rank"]
        latent = LayerShape(1, rank + config["qk_rope_head_dim"], 0, shared_dim=rank)
        return (latent,) * config["num_hidden_layers"]
    windows = _windows(config)
    plain = LayerShape(num_kv_heads, head_dim, head_dim)
    if config.get("model_type") in KINDS:
        kept = tuple(plain for kind in layer_types(config) if kind in WITH_ATTENTION)
        return kept or (NO_ATTENTION,)
    shapes = [replace(plain, window=window) for window in windows]
    if "global_head_dim" not in config:
        return tuple(shapes)
    first_shared = len(shapes) - config.get("num_kv_shared_layers", 0)
    return tuple(
        replace(
            shape if shape.window else _full_shape(config, index, num_kv_heads),
            source=_source(windows, index, first_shared),
        )
        for index, shape in enumerate(shapes)
    )


def _full_shape(config: Config, index: int, num_kv_heads: int) -> LayerShape:
    """Return what Gemma 4's layer `index` keeps, if it reads all tokens.

    Published configs give the heads of such layers once, those that transformers saves for each.
    """
    num_heads = config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")
    once: Config = {"head_dim": config["global_head_dim"], "num_key_value_heads": num_heads}
    of_layers: Mapping[str, Config] = config.get("per_layer_config") or {}
    given = of_layers.get(str(index), once)
    dim: int = given["head_dim"]
    still = dim - _rotated_dims(config, dim)
    num_kv_heads = given.get("num_key_value_heads") or num_kv_heads
    return LayerShape(num_kv_heads, dim, dim - still, shared_dim=still)


def _rotated_dims(config: Config, dim: int) -> int:
    """Return how many dims of a head differ in K and V, in Gemma 4's layers that read all tokens.

    Only these are kept twice if K is folded into V.
    """
    if not config.get("attention_k_eq_v") or config.get("num_kv_shared_layers"):
        return dim
    rope: Mapping[str, Config] = config.get("rope_parameters") or {}
    given = rope.get("full_attention", {"partial_rotary_factor": 0.25})
    return 2 * int(given.get("partial_rotary_factor", 1.0) * dim // 2)


def states(config: Config, num_parts: int = 1) -> tuple[LayerState, ...]:
    """Return the states of the layers that keep one, as the engine's `DecoderSpec.states`.

    Raises as `layer_states` does.
    """
    if config.get("model_type") not in KINDS:
        return ()
    return tuple(state for state in layer_states(config, num_parts) if state)


def unfreed_shapes(config: Config, shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the shapes if each layer kept K and V of all heads and of all tokens."""
    if config.get("model_type") in LATENT_TYPES:
        key_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        whole = LayerShape(config["num_attention_heads"], key_dim, config["v_head_dim"])
        return (whole,) * len(shapes)
    return tuple(LayerShape(shape.num_kv_heads, *shape.dims) for shape in shapes)


def num_layer_parameters(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the parameters of all layers: attention without biases, gated MLPs, experts, norms.

    sizes: `num_layers`, `hidden_size`, `intermediate_size`, `num_heads`, `num_kv_heads` and
    `head_dim`. Layers of other widths than the first (Gemma 4's) count as the first.
    """
    return sum(layer_parameters(config, sizes, index) for index in range(sizes["num_layers"]))


def layer_parameters(config: Config, sizes: Mapping[str, int], index: int) -> int:
    """Return the parameters of layer `index`, counted as in `num_layer_parameters`."""
    hidden, is_sparse = sizes["hidden_size"], has_experts(config, index)
    count = attention_parameters(config, sizes) + 2 * hidden
    if is_sparse:
        count += _expert_parameters(config, sizes)
    if not is_sparse or config.get("enable_moe_block"):
        count += 3 * hidden * dense_width(config, sizes)
    return count


def has_experts(config: Config, index: int) -> bool:
    """Whether layer `index` is a mixture of experts, as the engine's `LayerSpec.has_experts`."""
    if config.get("model_type") == "nemotron_h":
        return layer_types(config)[index] == "moe"
    if _first(config, _COUNT_NAMES, 0) <= 1:
        return False
    kinds = config.get("mlp_layer_types")
    if kinds:
        return kinds[index] == "sparse"
    first = _first(config, _DENSE_NAMES, 0)
    last = config.get("moe_layer_end_index", index)
    step = _first(config, ("decoder_sparse_step", "moe_layer_interval"), 1)
    is_dense = index in (config.get("mlp_only_layers") or ())
    return first <= index <= last and (index + 1) % step == 0 and not is_dense


def _windows(config: Config) -> list[int | None]:
    """Return the window of each layer; None for a layer that reads all tokens."""
    layers = range(config["num_hidden_layers"])
    window: int | None = config.get("sliding_window")
    kinds = config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return [None for _ in layers]
    if kinds:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    pattern, first = config.get("sliding_window_pattern"), config.get("max_window_layers", 0)
    if pattern:
        every: int | None = config.get("prefix_dense_sliding_window_pattern")
        num_dense = _first(config, _DENSE_NAMES, 0) if every else 0  # first, with their own pattern
        prefix = [window if (index + 1) % (every or 1) else None for index in range(num_dense)]
        rest = range(len(layers) - num_dense)
        return prefix + [window if (index + 1) % pattern else None for index in rest]
    return [window if index >= first else None for index in layers]


def _source(windows: list[int | None], index: int, first_shared: int) -> int | None:
    """Return the layer whose K and V a shared layer reads: the last of its kind that has some."""
    if index < first_shared:
        return None
    return max(i for i in range(first_shared) if windows[i] == windows[index])


def attention_parameters(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the parameters of a layer's attention, without biases."""
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if config.get("model_type") not in LATENT_TYPES:
        return 2 * (heads + sizes["num_kv_heads"]) * sizes["head_dim"] * hidden
    rank, rope, nope = (config[key] for key in LATENT_DIMS)
    value, query_rank = config["v_head_dim"], config.get("q_lora_rank")
    queries = heads * (nope + rope)
    query = query_rank * (hidden + 1 + queries) if query_rank else hidden * queries
    keys = hidden * (rank + rope) + rank + rank * heads * (nope + value)
    return query + keys + heads * value * hidden


def _expert_parameters(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the parameters of a layer's experts, its shared experts and its router."""
    hidden, count = sizes["hidden_size"], expert_count(config)
    width, shared = expert_width(config, sizes), shared_width(config, sizes)
    return hidden * (count + 3 * (count * width + shared))


def expert_count(config: Config) -> int:
    """Return how many experts a layer chooses from."""
    return _first(config, _COUNT_NAMES, 0)


def dense_width(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the intermediate size of layers without experts."""
    width = sizes["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):  # LFM2
        factor, step = config["block_ffn_dim_multiplier"], config["block_multiple_of"]
        width = int(2 * width / 3)
        return width if factor is None else -(-int(factor * width) // step) * step
    if config.get("model_type") == "granitemoehybrid":
        return config["shared_intermediate_size"]
    return config.get("prefix_dense_intermediate_size") or width


def mlp_matrices(config: Config) -> int:
    """Return how many matrices an MLP has: two without a gate."""
    return 2 if config.get("model_type") == "nemotron_h" else 3


def expert_width(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the intermediate size of an expert."""
    widths: int | list[int] | None = config.get("moe_intermediate_size")
    return (widths[0] if isinstance(widths, list) else widths) or sizes["intermediate_size"]


def shared_width(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the intermediate size of a layer's shared experts together; 0 if there are none."""
    shared = _first(config, _SHARED_WIDTHS, -1)
    if shared >= 0:
        return shared
    is_hunyuan = config.get("model_type") == "hunyuan_v1_moe"
    count = 1 if is_hunyuan else _first(config, _SHARED_NAMES, 0)
    return count * expert_width(config, sizes)


def _first(config: Config, names: tuple[str, ...], default: int) -> int:
    """Return the first of these settings that is not None, or the default."""
    return next((config[name] for name in names if config.get(name) is not None), default)
