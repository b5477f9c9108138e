"""`DecoderSpec`: a model's published settings in one form for all families.

`engine.model.published` reads it from the model's config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from core.configuration.kv_layout import NO_ATTENTION, LayerShape
from engine.model.families import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from core.states.layout import LayerState

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Config fields that are lists with one entry per layer."""
KEYS_AND_VALUES = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The settings that may differ between the layers of one model."""

    window: int | None
    """Sliding window in tokens, including the current one; None for full attention."""
    scale: float
    """Factor on the dot products of queries and keys."""
    rope: str | None
    """Key of the layer's rotary parameters in `DecoderSpec.ropes`; None: no rotary embedding."""
    has_experts: bool
    num_kv_heads: int
    head_dim: int
    """With latents, that of the rotated key."""
    mlp_width: int
    """The MLP's intermediate size."""
    source: int | None
    """The earlier layer whose K and V it reads; None: its own."""
    shared_dim: int = 0
    """Dims of a head that K and V share in the KV cache: those that are not rotated, if K is folded
    into V."""
    state: LayerState = ()
    """The state that it keeps, or this process's part of it; () without one."""
    has_attention: bool = True


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of latent attention, in elements; see `engine.model.latent_attention`."""

    rank: int
    """Of the latent from which all heads' K and V come."""
    rope: int
    """Rotated dims of queries and of the one key that all heads share."""
    nope: int
    """Dims of a head's query that are not rotated."""
    value: int
    """Dims of a head's V."""
    query_rank: int | None
    """Of the latent from which all heads' queries come; None: they come from the hidden state."""


class QueryScaling(NamedTuple):
    """The factor `1 + beta * log(1 + position // original)` on queries (Llama 4, Mistral 4)."""

    beta: float
    original: int
    """The length of the original training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything the decoder needs to know about a model. Sizes are numbers of elements."""

    model_type: str
    family: Family
    config: PreTrainedConfig
    vocab_size: int
    hidden_size: int
    num_heads: int
    latent: LatentSizes | None
    """None: K and V of every head are in the cache."""
    rotates_pairs: bool
    """Whether neighbouring elements of a head rotate together, instead of i and i + half."""
    norm_eps: float
    activation: str
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, Mapping[str, Any]]
    """transformers' `rope_parameters` by layer type, or under "" if all layers share them."""
    query_scaling: QueryScaling | None
    """None if no position of a sequence changes its queries."""
    softcap: float | None
    """Softcap of attention scores."""
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float | None
    is_tied: bool
    qk_norm: str
    """See `Family.qk_norm`."""
    norms: tuple[str, str, str, str]
    """See `Family.norms`."""
    is_parallel: bool
    """Whether attention and MLP both read the layer's input, and both outputs are added to it."""
    qkv_clip: float | None
    """Clamp queries, keys and values to [-qkv_clip, qkv_clip]."""
    max_length: int
    """Maximum tokens of a sequence; selects between longrope's two sets of factors."""

    @property
    def shapes(self) -> list[LayerShape]:
        """What the layers with attention keep of a token; NO_ATTENTION, if there are none."""
        shapes = [self._shape(layer) for layer in self.layers if layer.has_attention]
        return shapes or [NO_ATTENTION]

    def _shape(self, layer: LayerSpec) -> LayerShape:
        key_dim, shared_dim = layer.head_dim, layer.shared_dim
        value_dim = key_dim - shared_dim
        if self.latent is not None:
            key_dim, value_dim, shared_dim = (
                self.latent.rank + self.latent.rope,
                0,
                self.latent.rank,
            )
        source = None if layer.source is None else self.cache_index(layer.source)
        return LayerShape(layer.num_kv_heads, key_dim, value_dim, layer.window, source, shared_dim)

    @property
    def states(self) -> list[LayerState]:
        """The states of the layers that keep one."""
        return [layer.state for layer in self.layers if layer.state]

    def cache_index(self, index: int) -> int:
        """Return the number of layer `index` among those with attention, as `shapes` counts."""
        return sum(layer.has_attention for layer in self.layers[:index])

    def state_index(self, index: int) -> int:
        """Return the number of layer `index` among those with a state, as `states` counts."""
        return sum(bool(layer.state) for layer in self.layers[:index])

    @property
    def num_trial_layers(self) -> int:
        """How many leading layers the load-time gate tries: at least 2, and one of every kind."""
        firsts = [self.layers.index(kind) for kind in set(self.layers)]
        return min(max(2, max(firsts) + 1), len(self.layers))

    def first_layers_config(self, num_layers: int) -> PreTrainedConfig:
        """Return a transformers config for a model with only the first `num_layers` layers.

        If the decoder uses longrope's long factors, the config makes transformers use them for
        short prompts too.
        """
        config: Any = deepcopy(self.config)
        for name in PER_LAYER:
            stored = config.attribute_map.get(name, name)
            if vars(config).get(stored):  # not if it follows from other settings
                setattr(config, name, getattr(config, name)[:num_layers])
        num_dropped = len(self.layers) - num_layers
        if getattr(config, "num_kv_shared_layers", 0):
            config.num_kv_shared_layers = max(0, config.num_kv_shared_layers - num_dropped)
        config.num_hidden_layers = num_layers
        ropes = published_ropes(config) if self.ropes else {}
        for parameters in ropes.values():
            if parameters["rope_type"] == "longrope" and is_long(parameters, self.max_length):
                parameters["short_factor"] = parameters["long_factor"]
                if "long_mscale" in parameters:
                    parameters["short_mscale"] = parameters["long_mscale"]
        return config


def is_long(parameters: Mapping[str, Any], max_length: int) -> bool:
    """Whether sequences may exceed the original length, so that longrope uses its long factors."""
    return max_length > parameters["original_max_position_embeddings"]


def is_unread(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor belongs to multi-token prediction, which is not computed, or to the K and V
    of a layer that reads those of another one."""
    relative = name.removeprefix(spec.family.prefix)
    kind, _, rest = relative.partition(".")
    index, _, part = rest.partition(".")
    if kind == spec.family.layers and index.isdigit() and int(index) < len(spec.layers):
        is_shared = spec.layers[int(index)].source is not None
        return is_shared and part.startswith(KEYS_AND_VALUES)
    count = getattr(spec.config, "num_nextn_predict_layers", None) or 0
    is_later = kind == spec.family.layers and index.isdigit()
    return relative.startswith("mtp") or (is_later and int(index) < len(spec.layers) + count)


def published_ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Return transformers' `rope_parameters` of a config, as `DecoderSpec.ropes` has them."""
    parameters = config.rope_parameters
    return {"": parameters} if "rope_type" in parameters else dict(parameters)
