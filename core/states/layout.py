"""The states that some layers keep of a sequence, in place of K and V of every token.

A state has one size, however long its sequence is. A sequence's states in all layers lie in one row
of bytes, its slot, so that whoever moves a sequence moves one row. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from core.configuration.layout import equal_part
from core.configuration.options import StateDType
from core.errors import ConfigurationError

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes."""
SUM_BYTES: Mapping[StateDType, int] = {"fp32": 4, "bf16": 2}
WITH_STATE = {"conv", "linear_attention", "hybrid"}
"""Values of `layer_types` of layers that keep a state."""
PUBLISHED = {
    "mamba": "linear_attention", "M": "linear_attention",
    "attention": "full_attention", "*": "full_attention",
    "E": "moe", "-": "mlp",
}  # fmt: skip
"""Other names of types in published files, by which transformers knows them."""
OF_STATES_ALONE = {"mamba", "falcon_mamba", "mamba2"}
"""Model types all of whose layers keep a state, and no K and V."""
WITH_ATTENTION = {"full_attention", "hybrid"}
"""Of layers that keep K and V, in models where others keep a state."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state."""

    dims: tuple[int, ...]
    is_sum: bool
    """Sums over all tokens so far, of `option.state_dtype`. If not, it holds inputs of the layer,
    in the dtype of the computation."""

    def num_bytes(self, itemsize: int, sum_itemsize: int) -> int:
        """itemsize: bytes of an element of the computation's dtype. sum_itemsize: of sums."""
        return prod(self.dims) * (sum_itemsize if self.is_sum else itemsize)


LayerState = tuple[StateShape, ...]
"""The tensors of one layer's state; () if it keeps none."""


def offsets(layers: Iterable[LayerState], itemsize: int, sum_itemsize: int) -> Iterator[int]:
    """Yield the byte of the slot at which each tensor begins, and at the end the slot's size."""
    position = 0
    for shape in (shape for layer in layers for shape in layer):
        yield position
        position += -(-shape.num_bytes(itemsize, sum_itemsize) // ALIGNMENT) * ALIGNMENT
    yield position


def slot_bytes(layers: Sequence[LayerState], itemsize: int, sum_itemsize: int) -> int:
    """Return the bytes of a sequence's states."""
    *_, size = offsets(layers, itemsize, sum_itemsize)
    return size


def sum_bytes(dtype: StateDType, model_type: str) -> int:
    """Return the bytes of an element of sums.

    Raises ConfigurationError if they are to be narrow, and the model has none.
    """
    if dtype != "fp32" and KINDS.get(model_type) in (None, _short_convolution):
        raise ConfigurationError(
            f"option.state_dtype={dtype}: {model_type} is not among our own decoders of delta nets "
            "and Mamba layers, whose states it is for; leave it out"
        )
    return SUM_BYTES[dtype]


def layer_states(config: Mapping[str, Any], num_parts: int = 1) -> list[LayerState]:
    """Return what each layer keeps in one of `num_parts` processes, () for layers without a state.

    config: of a model type in KINDS, with every setting that transformers' class has. Raises
    ConfigurationError if the processes cannot have equal parts.
    """
    state = KINDS[config["model_type"]](config, num_parts)
    return [state if kind in WITH_STATE else () for kind in layer_types(config)]


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return transformers' type of each layer, which many published files give in other words."""
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    given: Sequence[str] | None = next((config[name] for name in names if config.get(name)), None)
    if given:
        return [PUBLISHED.get(kind, kind) for kind in given]
    layers = range(config["num_hidden_layers"])
    if config["model_type"] == "falcon_h1":
        return ["hybrid" for _ in layers]
    if config["model_type"] in OF_STATES_ALONE:
        return ["linear_attention" for _ in layers]
    if "full_attention_interval" in config:  # Qwen
        every = config["full_attention_interval"]
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    if "attn_layer_indices" in config:  # Bamba
        with_attention, other = config["attn_layer_indices"] or (), "linear_attention"
    else:
        with_attention, other = config["full_attn_idxs"], "conv"  # LFM2
    return ["full_attention" if index in with_attention else other for index in layers]


class MambaSizes(NamedTuple):
    """The sizes of a whole Mamba layer."""

    num_channels: int
    size: int
    """Of a channel's state."""
    rank: int
    """Of the time steps, before their projection to all channels."""
    num_taps: int


def mamba_sizes(config: Mapping[str, Any]) -> MambaSizes:
    hidden, rank = config["hidden_size"], config["time_step_rank"]
    rank = -(-hidden // 16) if rank == "auto" else rank
    num_channels = int(config["expand"] * hidden)
    return MambaSizes(num_channels, config["state_size"], rank, config["conv_kernel"])


class Mamba2Sizes(NamedTuple):
    """The sizes of a whole Mamba-2 layer."""

    heads: int
    dim: int
    """Of a head."""
    size: int
    """Of a head's state for each of its dims."""
    groups: int
    num_taps: int


def mamba2_sizes(config: Mapping[str, Any]) -> Mamba2Sizes:
    if config["model_type"] == "mamba2":
        names = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
        return Mamba2Sizes(*(config[name] for name in names))
    if config["model_type"] == "nemotron_h":
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
        return Mamba2Sizes(*(config[name] for name in names))
    heads, size = config["mamba_n_heads"], config["mamba_d_state"]
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    return Mamba2Sizes(
        heads, inner // heads, size, config["mamba_n_groups"], config["mamba_d_conv"]
    )


def _short_convolution(config: Mapping[str, Any], num_parts: int) -> LayerState:
    width = equal_part(config["hidden_size"], num_parts, "channels of convolutions")
    return (_tail(config["conv_L_cache"], width),)


def _delta_net(config: Mapping[str, Any], num_parts: int) -> LayerState:
    key_heads = equal_part(config["linear_num_key_heads"], num_parts, "key heads of delta nets")
    heads, key_dim = config["linear_num_value_heads"] // num_parts, config["linear_key_head_dim"]
    value_dim = config["linear_value_head_dim"]
    num_channels = 2 * key_heads * key_dim + heads * value_dim
    matrices = StateShape((heads, key_dim, value_dim), is_sum=True)
    return _tail(config["linear_conv_kernel_dim"], num_channels), matrices


def _mamba(config: Mapping[str, Any], num_parts: int) -> LayerState:
    num_channels, size, _, num_taps = mamba_sizes(config)
    num_channels = equal_part(num_channels, num_parts, "channels of Mamba layers")
    return _tail(num_taps, num_channels), StateShape((size, num_channels), is_sum=True)


def _mamba2(config: Mapping[str, Any], num_parts: int) -> LayerState:
    heads, dim, size, groups, num_taps = mamba2_sizes(config)
    # If there are fewer groups than parts, several parts have heads of the same group.
    groups = equal_part(groups, num_parts, "groups of Mamba heads") if num_parts % groups else 1
    heads = equal_part(heads, num_parts, "Mamba heads")
    matrices = StateShape((heads, size, dim), is_sum=True)
    return _tail(num_taps, heads * dim + 2 * groups * size), matrices


def _tail(num_taps: int, num_channels: int) -> StateShape:
    """Return the newest inputs of a causal convolution, all but the one that comes next."""
    return StateShape((num_taps - 1, num_channels), is_sum=False)


KINDS: Mapping[str, Callable[[Mapping[str, Any], int], LayerState]] = {
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "granitemoehybrid": _mamba2,
    "bamba": _mamba2,
    "falcon_h1": _mamba2,
    "nemotron_h": _mamba2,
    "mamba2": _mamba2,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "qwen3_next": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_5_moe_text": _delta_net,
}
"""The state of a layer, or one of several equal parts of it, by model type."""
