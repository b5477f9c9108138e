"""The parameters of decoders some of whose layers keep a state.

A layer has a mixer, which is attention, a short convolution, a delta net or Mamba-2, and an MLP or
experts. Falcon-H1's layers have both attention and Mamba-2; each of Nemotron-H's has one of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from container.capacity.architecture import (
    Config,
    attention_parameters,
    dense_width,
    expert_count,
    expert_width,
    has_experts,
    shared_width,
)
from core.states.layout import WITH_ATTENTION, WITH_STATE, layer_types, mamba2_sizes


def num_mixed_parameters(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the parameters of all layers, without the biases of linear ones.

    sizes: as for `num_layer_parameters`.
    """
    norm = sizes["hidden_size"]
    return sum(
        norm + part
        for index, kind in enumerate(layer_types(config))
        for part in _parts(config, sizes, kind, index)
    )


def _parts(config: Config, sizes: Mapping[str, int], kind: str, index: int) -> Iterator[int]:
    """Yield the parameters of what follows each norm of a layer."""
    hidden = sizes["hidden_size"]
    has_mixer = kind in WITH_STATE | WITH_ATTENTION
    if has_mixer:
        state_layer = _state_layer(config, hidden) if kind in WITH_STATE else 0
        yield state_layer + (_attention(config, sizes) if kind in WITH_ATTENTION else 0)
    if has_mixer and config["model_type"] == "nemotron_h":
        return
    if has_experts(config, index):
        yield _experts(config, sizes)
    else:
        yield _mlp(config, hidden, dense_width(config, sizes))


def _attention(config: Config, sizes: Mapping[str, int]) -> int:
    hidden, dim, model_type = sizes["hidden_size"], sizes["head_dim"], config["model_type"]
    gates = hidden * sizes["num_heads"] * dim if model_type.startswith("qwen3") else 0
    norms = 2 * dim if model_type.startswith(("qwen3", "lfm2")) else 0
    return attention_parameters(config, sizes) + gates + norms


def _state_layer(config: Config, hidden: int) -> int:
    if config["model_type"].startswith("lfm2"):
        return hidden * (4 * hidden + config["conv_L_cache"])
    return (_delta_net if config["model_type"].startswith("qwen3") else _mamba2)(config, hidden)


def _delta_net(config: Config, hidden: int) -> int:
    heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * value_dim
    projected = 2 * keys + 2 * values + 2 * heads
    taps = (2 * keys + values) * config["linear_conv_kernel_dim"]
    return hidden * (projected + values) + taps + 2 * heads + value_dim


def _mamba2(config: Config, hidden: int) -> int:
    heads, dim, size, groups, num_taps = mamba2_sizes(config)
    inner = heads * dim
    convolved = inner + 2 * groups * size
    norm = inner if config.get("mamba_rms_norm", True) else 0
    return hidden * (2 * inner + convolved + heads) + convolved * (num_taps + 1) + 3 * heads + norm


def _mlp(config: Config, hidden: int, width: int) -> int:
    return (2 if config["model_type"] == "nemotron_h" else 3) * hidden * width


def _experts(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the parameters of a layer's experts, its shared experts and its router."""
    hidden, count = sizes["hidden_size"], expert_count(config)
    latent: int = config.get("moe_latent_size") or 0
    experts = count * _mlp(config, latent or hidden, expert_width(config, sizes))
    shared = _mlp(config, hidden, shared_width(config, sizes))
    gate = hidden if config.get("shared_expert_intermediate_size") else 0
    return experts + shared + gate + hidden * (count + 2 * latent)
