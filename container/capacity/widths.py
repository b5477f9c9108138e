"""How wide the layers of a decoder are: what a token takes, and all linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from container.capacity.architecture import (
    LATENT_DIMS,
    LATENT_TYPES,
    Config,
    dense_width,
    expert_width,
    has_experts,
    mlp_matrices,
    shared_width,
)
from core.configuration.kv_layout import LayerShape

_TOP_K_NAMES = (
    "num_experts_per_tok",
    "moe_k",
    "moe_topk",
    "top_k_experts",
    "num_experts_per_token",
)


@dataclass(frozen=True, slots=True)
class Width:
    """A number of elements: those that each GPU has, and those that GPUs divide."""

    whole: int
    divided: int = 0

    def share(self, count: int) -> Width:
        return Width(self.whole + -(-self.divided // count))

    def __add__(self, other: Width) -> Width:
        return Width(self.whole + other.whole, self.divided + other.divided)


def activations(config: Config, sizes: Mapping[str, int]) -> tuple[Width, ...]:
    """Return what a token takes in each part of a layer, with `around_parts`.

    The widest part decides. sizes: as for `num_layer_parameters`.
    """
    hidden = sizes["hidden_size"]
    around = around_parts(hidden)
    widest_mlp = _mlp_width(config, sizes, is_shared=bool(config.get("num_kv_shared_layers")))
    num_matrices = mlp_matrices(config)
    widths = [around + _attention(config, sizes), around + Width(0, num_matrices * widest_mlp)]
    if any(has_experts(config, index) for index in range(sizes["num_layers"])):
        count, width = _top_k(config), expert_width(config, sizes)
        rows: int = count * (config.get("moe_latent_size") or hidden)
        # Each expert's input, gate and up, and output; then the product of the last two, or the
        # outputs in the order of tokens. The shared experts' output waits beside them.
        widths.append(around + Width(hidden + 2 * rows, num_matrices * count * width))
        widths.append(around + Width(hidden + 3 * rows, (num_matrices - 1) * count * width))
    return tuple(widths)


def around_parts(hidden: int) -> Width:
    """Return what a token takes beside a part of a layer: its embedding, the residual stream before
    the layer and in it, the output of the layer before, that of the part before, and its norm."""
    return Width(6 * hidden)


def linears(config: Config, sizes: Mapping[str, int], shapes: Sequence[LayerShape]) -> Width:
    """Return the inputs and outputs of all linear layers but those of routed experts, added up.

    `mixed_linears` does so for models in which some layers keep a state.
    """
    inputs = config.get("hidden_size_per_layer_input") or 0
    total = Width(sizes["hidden_size"] + sizes["num_layers"] * inputs if inputs else 0)
    for index in range(sizes["num_layers"]):
        shape = shapes[index] if len(shapes) == sizes["num_layers"] else shapes[0]
        for width in _linears(config, sizes, shape, index):
            total += width
    return total


def _attention(config: Config, sizes: Mapping[str, int]) -> Width:
    heads = sizes["num_heads"]
    if config.get("model_type") not in LATENT_TYPES:
        return Width(0, 2 * (heads + sizes["num_kv_heads"]) * sizes["head_dim"])
    rank, rope, nope = (config[key] for key in LATENT_DIMS)
    of_a_head = nope + rope + (rank + rope) + rank + config["v_head_dim"]
    return Width((config.get("q_lora_rank") or 0) + rank + rope, heads * of_a_head)


def _linears(
    config: Config, sizes: Mapping[str, int], shape: LayerShape, index: int
) -> Iterator[Width]:
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if config.get("model_type") in LATENT_TYPES:
        rank, rope, nope = (config[key] for key in LATENT_DIMS)
        query_rank: int | None = config.get("q_lora_rank")
        yield Width((query_rank or 0) * 2 or hidden, heads * (nope + rope))
        yield Width((hidden if query_rank else 0) + hidden + rank + rope)
        yield Width(hidden, heads * config["v_head_dim"])
    else:
        dim, _ = shape.dims
        is_folded = bool(config.get("attention_k_eq_v")) and shape.window is None
        num_keys = 0 if shape.source is not None else 1 if is_folded else 2
        yield Width(2 * hidden, 2 * heads * dim)
        yield Width(num_keys * hidden, num_keys * shape.num_kv_heads * dim)
    yield from feed_forward(config, sizes, index, is_shared=shape.source is not None)
    if inputs := config.get("hidden_size_per_layer_input") or 0:
        yield Width(2 * (hidden + inputs))


def feed_forward(
    config: Config, sizes: Mapping[str, int], index: int, *, is_shared: bool = False
) -> Iterator[Width]:
    """Yield the inputs and outputs of the linear layers of layer `index` that are not attention.

    is_shared: whether the layer reads the K and V of another one.
    """
    hidden, is_sparse = sizes["hidden_size"], has_experts(config, index)
    if is_sparse and (shared := shared_width(config, sizes)):
        has_gate = config.get("shared_expert_intermediate_size") is not None
        yield _mlp(config, hidden, shared) + Width(hidden + 1 if has_gate else 0)
    if is_sparse and (latent := config.get("moe_latent_size") or 0):
        yield Width(2 * (hidden + latent))
    if not is_sparse or config.get("enable_moe_block"):
        yield _mlp(config, hidden, _mlp_width(config, sizes, is_shared=is_shared))


def _mlp(config: Config, hidden: int, width: int) -> Width:
    """Granite 4 stores gate and up as one matrix."""
    count = mlp_matrices(config)
    is_merged = config.get("model_type") == "granitemoehybrid"
    return Width((2 if is_merged else count) * hidden, count * width)


def _mlp_width(config: Config, sizes: Mapping[str, int], *, is_shared: bool) -> int:
    """is_shared: whether the layer reads the K and V of another one."""
    is_double = is_shared and config.get("use_double_wide_mlp")
    return dense_width(config, sizes) * (2 if is_double else 1)


def _top_k(config: Config) -> int:
    given: int | list[int] = next((config[name] for name in _TOP_K_NAMES if config.get(name)), 1)
    return max(given) if isinstance(given, list) else given
