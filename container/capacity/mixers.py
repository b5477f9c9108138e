"""The parameters and widths of decoders some of whose layers keep a state.

A layer has a mixer, which is attention, a short convolution, a delta net or Mamba, and an MLP or
experts. Falcon-H1's layers have both attention and Mamba-2; each of Nemotron-H's has one of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from container.capacity.architecture import (
    Config,
    attention_parameters,
    dense_width,
    expert_count,
    expert_width,
    has_experts,
    mlp_matrices,
    shared_width,
)
from container.capacity.widths import Width, activations, around_parts, feed_forward
from core.states.layout import (
    OF_STATES_ALONE,
    WITH_ATTENTION,
    WITH_STATE,
    layer_types,
    mamba2_sizes,
    mamba_sizes,
)


class _StateLayer(NamedTuple):
    """A part that keeps a state: a projection, a convolution, a recurrence, another projection."""

    convolved: int
    """Outputs of the first projection that are convolved."""
    others: int
    """Its other outputs: gates."""
    inner: int
    """Inputs of the last projection."""
    num_merged: int
    """Linear layers that are merged into the first projection."""
    num_taps: int
    num_small: int
    """Parameters that are no matrices: biases and norms."""
    has_recurrence: bool = True
    middle: Width = Width(0)
    """Inputs and outputs of linear layers between the convolution and the recurrence."""
    num_in_middle: int = 0
    """Their weights."""

    @property
    def projected(self) -> int:
        return self.convolved + self.others

    def num_parameters(self, hidden: int) -> int:
        matrices = hidden * (self.projected + self.inner)
        return matrices + self.num_taps * self.convolved + self.num_small + self.num_in_middle

    def linears(self, hidden: int) -> Width:
        ends = Width((self.num_merged + 1) * hidden, self.projected + self.inner)
        return ends + self.middle

    def activations(self, hidden: int) -> Width:
        """Return what a token takes, with `around_parts`.

        After a recurrence its output is normed, and concatenated with its gate, before both are
        multiplied. The projection and what is convolved are still there.
        """
        products = 4 * self.inner if self.has_recurrence else 0
        if self.num_in_middle:  # gates of all channels in fp32, and what they are computed from
            products += 2 * self.inner
        return around_parts(hidden) + Width(0, self.projected + self.convolved + products)


def num_mixed_parameters(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the parameters of all layers, without the biases of linear ones.

    sizes: as for `num_layer_parameters`.
    """
    kinds = enumerate(layer_types(config))
    return sum(mixed_layer_parameters(config, sizes, kind, index) for index, kind in kinds)


def mixed_layer_parameters(config: Config, sizes: Mapping[str, int], kind: str, index: int) -> int:
    """Return the parameters of a layer of this kind, counted as in `num_mixed_parameters`."""
    norm = sizes["hidden_size"]
    return sum(norm + part for part in _parts(config, sizes, kind, index))


def mixed_linears(config: Config, sizes: Mapping[str, int]) -> Width:
    """Return the inputs and outputs of all linear layers but those of routed experts, added up."""
    total = Width(0)
    for index, kind in enumerate(layer_types(config)):
        for width in _linears(config, sizes, kind, index):
            total += width
    return total


def mixed_activations(config: Config, sizes: Mapping[str, int]) -> tuple[Width, ...]:
    """Return what a token takes in each part of a layer, as `widths.activations` does."""
    hidden, around = sizes["hidden_size"], around_parts(sizes["hidden_size"])
    state_layer = _state_layer(config, hidden)
    widths = (*activations(config, sizes), state_layer.activations(hidden))
    if _gates_attention(config):
        # The projected gates, their sigmoid, and its product with attention's output; q and k are
        # normed.
        num_heads = 6 * sizes["num_heads"] + 3 * sizes["num_kv_heads"]
        return (*widths, around + Width(0, num_heads * sizes["head_dim"]))
    if config["model_type"] == "falcon_h1":
        # Outputs of linear layers are multiplied by constants, in fp32.
        widest = max(state_layer.projected, 2 * dense_width(config, sizes))
        return (*widths, around + Width(0, 4 * widest))
    return widths


def _parts(config: Config, sizes: Mapping[str, int], kind: str, index: int) -> Iterator[int]:
    """Yield the parameters of what follows each norm of a layer."""
    hidden = sizes["hidden_size"]
    has_mixer = kind in WITH_STATE | WITH_ATTENTION
    if has_mixer:
        has_state = kind in WITH_STATE
        state_layer = _state_layer(config, hidden).num_parameters(hidden) if has_state else 0
        yield state_layer + (_attention(config, sizes) if kind in WITH_ATTENTION else 0)
    if has_mixer and _has_one_part(config):
        return
    if has_experts(config, index):
        yield _experts(config, sizes)
    else:
        yield mlp_matrices(config) * hidden * dense_width(config, sizes)


def _linears(config: Config, sizes: Mapping[str, int], kind: str, index: int) -> Iterator[Width]:
    """Yield the inputs and outputs of the linear layers of a layer."""
    hidden = sizes["hidden_size"]
    if kind in WITH_STATE:
        yield _state_layer(config, hidden).linears(hidden)
    if kind in WITH_ATTENTION:
        num_queries = (3 if _gates_attention(config) else 2) * sizes["num_heads"]
        outputs = (num_queries + 2 * sizes["num_kv_heads"]) * sizes["head_dim"]
        yield Width(4 * hidden, outputs)
    if kind not in WITH_STATE | WITH_ATTENTION or not _has_one_part(config):
        yield from feed_forward(config, sizes, index)


def _has_one_part(config: Config) -> bool:
    return config["model_type"] in OF_STATES_ALONE | {"nemotron_h"}


def _gates_attention(config: Config) -> bool:
    return config["model_type"].startswith("qwen3")


def _attention(config: Config, sizes: Mapping[str, int]) -> int:
    hidden, dim, model_type = sizes["hidden_size"], sizes["head_dim"], config["model_type"]
    gates = hidden * sizes["num_heads"] * dim if _gates_attention(config) else 0
    norms = 2 * dim if model_type.startswith(("qwen3", "lfm2")) else 0
    return attention_parameters(config, sizes) + gates + norms


def _state_layer(config: Config, hidden: int) -> _StateLayer:
    if config["model_type"].startswith("lfm2"):
        gates, num_taps = 2 * hidden, config["conv_L_cache"]
        return _StateLayer(hidden, gates, hidden, 1, num_taps, 0, has_recurrence=False)
    if config["model_type"] in ("mamba", "falcon_mamba"):
        return _mamba(config)
    return (_delta_net if config["model_type"].startswith("qwen3") else _mamba2)(config)


def _delta_net(config: Config) -> _StateLayer:
    heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * value_dim
    num_merged = 2 if config["model_type"] == "qwen3_next" else 4
    num_taps, num_small = config["linear_conv_kernel_dim"], 2 * heads + value_dim
    return _StateLayer(
        2 * keys + values, values + 2 * heads, values, num_merged, num_taps, num_small
    )


def _mamba(config: Config) -> _StateLayer:
    width, size, rank, num_taps = mamba_sizes(config)
    selected = rank + 2 * size
    # x_proj and dt_proj; then biases of the convolution and of dt_proj, D and A
    return _StateLayer(
        width, width, width, 1, num_taps, (3 + size) * width,
        middle=Width(selected + rank, 2 * width), num_in_middle=width * (selected + rank),
    )  # fmt: skip


def _mamba2(config: Config) -> _StateLayer:
    heads, dim, size, groups, num_taps = mamba2_sizes(config)
    inner = heads * dim
    convolved = inner + 2 * groups * size
    norm = inner if config.get("mamba_rms_norm", True) else 0
    return _StateLayer(convolved, inner + heads, inner, 1, num_taps, convolved + 3 * heads + norm)


def _experts(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the parameters of a layer's experts, its shared experts and its router."""
    hidden, count, num_matrices = sizes["hidden_size"], expert_count(config), mlp_matrices(config)
    latent: int = config.get("moe_latent_size") or 0
    experts = num_matrices * count * (latent or hidden) * expert_width(config, sizes)
    shared = num_matrices * hidden * shared_width(config, sizes)
    gate = hidden if config.get("shared_expert_intermediate_size") else 0
    return experts + shared + gate + hidden * (count + 2 * latent)
