"""How the families of our own encoder differ, by transformers' model types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """The names of transformers' modules, and the order of a layer. The defaults are BERT's.

    Names of a layer's parts are relative to the layer, others to the model without its head.
    """

    embeddings: str = "embeddings"
    layers: str = "encoder.layer"
    qkv: tuple[str, ...] = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
    qk_norms: tuple[str, ...] = ()
    """The norms of each head of queries and of keys."""
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    gate_up: tuple[str, ...] = ("intermediate.dense",)
    """The layers before the activation. They have twice the inputs of `down` if there is a gate,
    which precedes what it multiplies."""
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    activation: str = "hidden_act"
    """The field of the config that names it."""
    norms_first: bool = False
    """Whether the norms precede attention and MLP, rather than follow the residual adds."""
    final_norm: str = ""
    position_bias: str = ""
    """The module with transformers' `compute_position_bias`, which is added to the scores of all
    layers; '' if none is."""
    is_causal: bool = False
    """Whether a token attends only to those before it, as in decoders that embed texts."""


_BERT = EncoderFamily()
_NOMIC = EncoderFamily(
    layers="layers",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    mlp_norm="post_mlp_layernorm",
)
_EUROBERT = replace(
    _NOMIC,
    embeddings="embed_tokens",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    norms_first=True,
    final_norm="norm",
)
_LLAMA = replace(_EUROBERT, is_causal=True)

FAMILIES: Mapping[str, EncoderFamily] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "distilbert": EncoderFamily(
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        gate_up=("ffn.lin1",),
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
        activation="activation",
    ),
    "mpnet": EncoderFamily(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        position_bias="encoder",
    ),
    "modernbert": EncoderFamily(
        layers="layers",
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        attention_norm="attn_norm",
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        activation="hidden_activation",
        norms_first=True,
        final_norm="final_norm",
    ),
    "nomic_bert": _NOMIC,
    "gte": _NOMIC,
    "eurobert": _EUROBERT,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, qk_norms=("self_attn.q_norm", "self_attn.k_norm")),
}
