"""The table of model families: how the layers of each differ from Llama's.

To add a family, add a row. Names are those of the checkpoint, below a layer or below the model.
Numbers (sizes, windows, scales) come from the model's config; see `engine.model.spec`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class NormKind:
    """RMSNorm, `x / rms(x) * (weight + offset)`, or LayerNorm, which subtracts the mean too."""

    subtracts_mean: bool = False
    offset: float = 0.0
    rounds_first: bool = True
    """In low precision: rounds before the product with the weight (Llama), or after (Gemma)."""


RMS = NormKind()
RMS_ROUNDED_LAST = NormKind(rounds_first=False)
GEMMA_RMS = NormKind(rounds_first=False, offset=1.0)
LAYER = NormKind(subtracts_mean=True)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts in place of the MLP.

    Each expert's tensors are named by `gate`, `up` and `down` below `experts.N.`, or all experts'
    lie in `merged`: gate and up, then down.
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    merged: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    shared: str = ""
    """An MLP beside the experts, which sees every token; its output has a gate of its own."""
    scores: Literal["of all", "of chosen"] = "of all"
    """Softmax over all experts, of which some are chosen; or over the chosen ones alone."""
    always_normalizes: bool = False
    """Scores of the chosen experts sum to 1; else where config.norm_topk_prob says so."""
    interleaved: bool = False
    """gpt-oss: merged tensors are [experts, in, out], gate and up alternate, both are clamped."""


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table. The defaults are Llama."""

    # Names
    prefix: str = "model."
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """One name where the checkpoint has them in one tensor."""
    out: str = "o_proj"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name where both are one tensor, or where there is no gate; see `is_gated`."""
    down: str = "down_proj"
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """Before attention, after it, before the MLP, after it; empty where there is none."""
    renames: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names: as published, and as transformers' modules (and PEFT) have them."""

    # Layers
    norm: NormKind = RMS
    qk_norm: Literal["", "head", "row", "after rotary"] = ""
    """Normalizes queries and keys: each head, all heads as one row, or each head once rotated."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_is_optional: bool = False
    """config.use_qk_norm decides."""
    windows: Literal["none", "all", "by layer"] = "none"
    """Which layers have config.sliding_window: none, all, or those that config.layer_types says."""
    rotary: Literal["halves", "pairs", "none"] = "halves"
    """Which numbers of a head turn together: i and i + half, or 2i and 2i + 1."""
    rotates_windows_alone: bool = False
    """Layers without a sliding window have no rotary embedding, where others have one."""
    is_gated: bool = True
    is_parallel: bool = False
    """Attention and MLP are both added to the layer's input; config.use_parallel_residual, where
    there is one, decides instead."""
    parallel_shares_norm: bool = False
    """A layer that is parallel has no norm of its own before the MLP (StableLM)."""
    experts: ExpertNames | None = None
    scales_embedding: bool = False
    """By the root of the hidden size (Gemma)."""
    positions: str = ""
    """Name of a table of learned positions."""
    position_offset: int = 0
    is_transposed: bool = False
    """Weights of linear layers are [in, out] (GPT-2)."""
    qkv_by_head: bool = False
    """The one tensor holds q, k and v of one head after the other (GPT-NeoX)."""


LLAMA = Family()
BY_LAYER = replace(LLAMA, windows="by layer")
SANDWICH = ("input_layernorm", "post_attention_layernorm",
            "pre_feedforward_layernorm", "post_feedforward_layernorm")  # fmt: skip
POST = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GEMMA = replace(LLAMA, norm=GEMMA_RMS, scales_embedding=True)
OLMO2 = replace(LLAMA, norm=RMS_ROUNDED_LAST, norms=POST, qk_norm="row")
GLM = replace(LLAMA, rotary="pairs", gate_up=("gate_up_proj",))
QWEN_EXPERTS = ExpertNames()
UNGATED = replace(LLAMA, is_gated=False, gate_up=("up_proj",))
COHERE = replace(
    LLAMA, norm=LAYER, rotary="pairs", is_parallel=True, norms=("input_layernorm", "", "", "")
)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, windows="all"),
    "ministral": BY_LAYER,
    "qwen2": BY_LAYER,
    "smollm3": BY_LAYER,
    "seed_oss": LLAMA,
    "granite": LLAMA,
    "qwen3": replace(BY_LAYER, qk_norm="head"),
    "phi3": replace(LLAMA, qkv=("qkv_proj",), gate_up=("gate_up_proj",), windows="all"),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, norms=SANDWICH, windows="by layer"),
    "gemma3_text": replace(GEMMA, norms=SANDWICH, qk_norm="head", windows="by layer"),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, windows="by layer"),
    "exaone4": replace(BY_LAYER, norms=POST, qk_norm="head", rotates_windows_alone=True),
    "helium": replace(LLAMA, norm=RMS_ROUNDED_LAST, rotary="pairs"),
    "ernie4_5": replace(LLAMA, rotary="pairs"),
    "glm": GLM,
    "glm4": replace(
        GLM,
        norms=("input_layernorm", "post_self_attn_layernorm",
               "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "hunyuan_v1_dense": replace(
        LLAMA, qk_norm="after rotary", qk_norm_names=("query_layernorm", "key_layernorm")
    ),
    # No gate in the MLP
    "arcee": UNGATED,
    "apertus": replace(
        UNGATED, qk_norm="head", norms=("attention_layernorm", "", "feedforward_layernorm", "")
    ),
    "nemotron": replace(UNGATED, norm=NormKind(subtracts_mean=True, offset=1.0)),
    "starcoder2": replace(UNGATED, norm=LAYER, gate_up=("c_fc",), down="c_proj", windows="all"),
    # LayerNorm
    "stablelm": replace(LLAMA, norm=LAYER, parallel_shares_norm=True),
    "cohere": replace(COHERE, qk_norm="head", qk_norm_is_optional=True),
    "cohere2": replace(COHERE, windows="by layer", rotates_windows_alone=True),
    "gpt2": Family(
        prefix="transformer.", layers="h", embedding="wte", final_norm="ln_f",
        attention="attn", qkv=("c_attn",), out="c_proj", gate_up=("c_fc",), down="c_proj",
        norms=("ln_1", "", "ln_2", ""), norm=LAYER, rotary="none", is_gated=False,
        positions="wpe", is_transposed=True,
    ),
    "gpt_neox": Family(
        prefix="gpt_neox.", embedding="embed_in", final_norm="final_layer_norm",
        renames=(("embed_out.", "lm_head."),),
        attention="attention", qkv=("query_key_value",), out="dense",
        gate_up=("dense_h_to_4h",), down="dense_4h_to_h",
        norm=LAYER, is_gated=False, qkv_by_head=True,
    ),
    "opt": Family(
        prefix="model.decoder.", final_norm="final_layer_norm", out="out_proj",
        mlp="", gate_up=("fc1",), down="fc2",
        norms=("self_attn_layer_norm", "", "final_layer_norm", ""),
        norm=LAYER, rotary="none", is_gated=False, positions="embed_positions", position_offset=2,
    ),
    # Mixtures of experts
    "mixtral": replace(
        LLAMA,
        experts=ExpertNames(gate="w1", up="w3", down="w2", always_normalizes=True),
        renames=((".block_sparse_moe.", ".mlp."),),
        windows="all",
    ),
    "qwen2_moe": replace(BY_LAYER, experts=replace(QWEN_EXPERTS, shared="shared_expert")),
    "qwen3_moe": replace(LLAMA, qk_norm="head", experts=QWEN_EXPERTS, windows="all"),
    "olmoe": replace(LLAMA, qk_norm="row", experts=QWEN_EXPERTS),
    "granitemoe": replace(
        LLAMA,
        experts=ExpertNames(block="block_sparse_moe", router="router", scores="of chosen"),
        renames=(
            (".input_linear.weight", ".experts.gate_up_proj"),
            (".output_linear.weight", ".experts.down_proj"),
            (".router.layer.", ".router."),
        ),
    ),
    "gpt_oss": replace(
        BY_LAYER,
        norm=RMS_ROUNDED_LAST,
        experts=ExpertNames(router="router", scores="of chosen", interleaved=True),
    ),
}  # fmt: skip
"""By `model_type` of config.json. A family that is not here runs by transformers' own code."""
