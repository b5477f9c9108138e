"""What llama.cpp stores otherwise than transformers, of LFM2 and Qwen3.5, whose layers have states.

The rules are those of llama.cpp's converter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ARCHITECTURES = {"lfm2": "lfm2", "qwen3_5_text": "qwen35"}
"""llama.cpp's architectures by transformers' model types. Our engine does not read their files."""
CONVOLUTIONS = ("conv.conv.weight", "conv1d.weight")
NUMBERS = {
    "conv_L_cache": "shortconv.l_cache", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank", "linear_size": "ssm.inner_size",
    "full_attention_interval": "full_attention_interval",
    "mrope_section": "rope.dimension_sections",
}  # fmt: skip
"""llama.cpp's keys by the names of `complete`."""


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of config.json with those that llama.cpp needs besides."""
    if config["model_type"] == "lfm2":
        width = config["intermediate_size"]
        if config["block_auto_adjust_ff_dim"]:
            unit = config["block_multiple_of"]
            width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
            width = (width + unit - 1) // unit * unit
        kv_heads = [
            0 if kind == "conv" else config["num_key_value_heads"] for kind in config["layer_types"]
        ]
        own = {"num_key_value_heads": kv_heads, "rms_norm_eps": config["norm_eps"]}
        return config | own | {"intermediate_size": width}
    if config["model_type"] == "qwen3_5_text":
        return config | {
            "linear_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
            "full_attention_interval": config["layer_types"].index("full_attention") + 1,
            "mrope_section": [*config["rope_parameters"].get("mrope_section", (11, 11, 10)), 0],
        }
    return config


def as_stored(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a tensor as llama.cpp stores it: convolutions as [channels, kernel], A instead of the
    logarithm of -A, norms with the 1 that Qwen3.5 adds."""
    if config["model_type"] not in ARCHITECTURES:
        return weight
    if name.endswith(CONVOLUTIONS):
        weight = weight.squeeze(1)
    if ".linear_attn." in name:
        weight = _tiled(name, weight, config)
        return -np.exp(weight) if name.endswith(".A_log") else weight
    has_offset = config["model_type"] == "qwen3_5_text" and name.endswith("norm.weight")
    return weight + np.float32(1) if has_offset else weight


def _tiled(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Reorder the heads of values. Those that share a head of keys are neighbours in transformers;
    in llama.cpp, the heads of keys alternate."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * keys * config["linear_key_head_dim"]

    def tile(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(keys, values // keys, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("norm.weight"):  # the same for all heads
        return weight
    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(tile(weight.T).T)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):  # queries and keys, then values
        return np.concatenate([weight[:first], tile(weight[first:])])
    return tile(weight)
