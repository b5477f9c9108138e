"""What a model's config says of its layers, in one form for all families."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from core.sizing import LayerShape
from engine.attention.call import UnsupportedModelError
from engine.model.families import FAMILIES, Family

EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
ACTIVATION_NAMES = ("hidden_activation", "hidden_act", "activation_function")
MLP_WIDTH_NAMES = ("intermediate_size", "ffn_dim", "n_inner")
PER_LAYER = ("layer_types", "no_rope_layers")
"""Lists with an entry for each layer."""
TORCH_LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ between the layers of one model, but for their weights."""

    window: int | None
    """Tokens that attention looks back on, the token itself included; None: all."""
    scale: float
    """Of the products of queries and keys."""
    rope: str | None
    """Which rotary parameters, by `DecoderSpec.ropes`; None where nothing is rotated."""
    has_experts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Sizes are numbers of elements."""

    model_type: str
    family: Family
    config: PreTrainedConfig
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    mlp_width: int
    """Of the layer between an MLP's products."""
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, Mapping[str, Any]]
    """transformers' `rope_parameters`, by layer type; by "" where all layers share them."""
    softcap: float | None
    """Of attention's scores."""
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float | None
    is_tied: bool
    qk_norm: str
    """As `Family.qk_norm`."""
    norms: tuple[str, str, str, str]
    """As `Family.norms`."""
    is_parallel: bool
    """Attention and MLP are added to the same input."""
    qkv_clip: float | None
    max_length: int
    """Most tokens of a sequence, which decides between longrope's two sets."""

    @property
    def shapes(self) -> list[LayerShape]:
        return [LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)] * len(self.layers)

    @property
    def sample_layers(self) -> int:
        """How many of the first layers have one of every kind, and at least two where there are."""
        firsts = [self.layers.index(kind) for kind in set(self.layers)]
        return min(max(2, max(firsts) + 1), len(self.layers))

    def config_of_first(self, num_layers: int) -> PreTrainedConfig:
        """For transformers: the model's first layers. If longrope's long set serves, it is that of
        short prompts too."""
        config: Any = deepcopy(self.config)
        for name in PER_LAYER:
            if getattr(config, name, None):
                setattr(config, name, getattr(config, name)[:num_layers])
        config.num_hidden_layers = num_layers
        ropes = _ropes(config) if self.ropes else {}
        for parameters in ropes.values():
            if parameters["rope_type"] == "longrope" and is_long(parameters, self.max_length):
                parameters["short_factor"] = parameters["long_factor"]
        return config


def is_long(parameters: Mapping[str, Any], max_length: int) -> bool:
    """Whether longrope uses its long set: always, if sequences may pass the original length."""
    return max_length > parameters["original_max_position_embeddings"]


def read_spec(config: PreTrainedConfig, max_length: int) -> DecoderSpec:
    """Raises UnsupportedModelError where the table has no row, or the config asks for more."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModelError(f"there is no row for {config.model_type} in the table")
    given: Any = config
    _refuse(given)
    num_heads = given.num_attention_heads
    head_dim = getattr(given, "head_dim", None) or given.hidden_size // num_heads
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
        num_kv_heads=_num_kv_heads(given, family),
        head_dim=head_dim,
        norm_eps=_first(given, EPS_NAMES) or TORCH_LAYER_NORM_EPS,
        activation=_first(given, ACTIVATION_NAMES),
        mlp_width=_first(given, MLP_WIDTH_NAMES) or 4 * given.hidden_size,
        layers=tuple(_layer(given, family, head_dim, i) for i in range(given.num_hidden_layers)),
        ropes={} if family.rotary == "none" else _ropes(given),
        softcap=getattr(given, "attn_logit_softcapping", None),
        embedding_scale=(
            given.hidden_size**0.5
            if family.scales_embedding
            else getattr(given, "embedding_multiplier", 1.0)
        ),
        residual_scale=getattr(given, "residual_multiplier", 1.0),
        logit_scale=getattr(given, "logit_scale", 1.0) / getattr(given, "logits_scaling", 1.0),
        logit_softcap=getattr(given, "final_logit_softcapping", None),
        is_tied=given.tie_word_embeddings,
        qk_norm=family.qk_norm if has_qk_norm else "",
        norms=norms,
        is_parallel=is_parallel,
        qkv_clip=getattr(given, "clip_qkv", None),
        max_length=max_length,
    )


def _refuse(config: Any) -> None:
    """Settings of rare members of a family."""
    refused = {
        f"its weights are quantized ({_method(config)})": _method(config),
        "its norms come after the residuals": not getattr(config, "do_layer_norm_before", True),
        "its embedding is projected": (
            getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size
        ),
        "it normalizes each head by weights of its own": getattr(config, "qk_layernorm", False),
        "it attends to an encoder": getattr(config, "add_cross_attention", False),
        "its norms have no weights": not getattr(config, "layer_norm_elementwise_affine", True),
        "none of its layers has a window": (
            config.model_type == "cohere2" and not config.sliding_window
        ),
        "its final norm is left out": getattr(config, "_remove_final_layer_norm", False),
    }
    for reason, is_so in refused.items():
        if is_so:
            raise UnsupportedModelError(reason)


def _method(config: Any) -> str | None:
    """Of quantization."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    given = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return str(given.get("quant_method", "by an unknown method"))


def _layer(config: Any, family: Family, head_dim: int, index: int) -> LayerSpec:
    window = getattr(config, "sliding_window", None) or None
    is_full = family.windows == "by layer" and config.layer_types[index] != "sliding_attention"
    return LayerSpec(
        window=None if family.windows == "none" or is_full else window,
        scale=_scale(config, head_dim, index),
        rope=_rope(config, family, index),
        has_experts=family.experts is not None and _has_experts(config, index),
    )


def _num_kv_heads(config: Any, family: Family) -> int:
    own = None if family.qkv_by_head else getattr(config, "num_key_value_heads", None)
    return own or config.num_attention_heads


def _scale(config: Any, head_dim: int, index: int) -> float:
    multiplier = getattr(config, "attention_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    scale = (getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5
    if not getattr(config, "scale_attn_weights", True):
        scale = 1.0
    divides = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    return scale / (index + 1) if divides else scale


def _rope(config: Any, family: Family, index: int) -> str | None:
    if family.rotary == "none":
        return None
    layer_types = getattr(config, "layer_types", None) or []
    # SmolLM3 lists the layers that rotate; two families rotate in those with a window alone.
    rotates = getattr(config, "no_rope_layers", None)
    if rotates and not rotates[index]:
        return None
    has_windows = getattr(config, "sliding_window", None) is not None
    if family.rotates_windows_alone and has_windows and layer_types[index] != "sliding_attention":
        return None
    return layer_types[index] if layer_types and layer_types[index] in _ropes(config) else ""


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    parameters = config.rope_parameters
    return {"": parameters} if "rope_type" in parameters else dict(parameters)


def _has_experts(config: Any, index: int) -> bool:
    step = getattr(config, "decoder_sparse_step", 1)
    return index not in (getattr(config, "mlp_only_layers", None) or ()) and (index + 1) % step == 0


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """The first of these settings that there is."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)
