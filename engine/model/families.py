"""The table of model families: how the layers of each family differ from Llama's.

To add a family, add a row. Names are tensor names in the checkpoint, relative to the layer or to
the model. Numbers (sizes, windows, scales) come from the config; see `engine.model.published`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class NormKind:
    """RMSNorm, `x / rms(x) * (weight + offset)`, or LayerNorm, which also subtracts the mean."""

    subtracts_mean: bool = False
    offset: float = 0.0
    rounds_first: bool = True
    """Whether low precision rounds the normed values before the multiplication by the weight
    (Llama), rather than after it (Gemma)."""


RMS = NormKind()
RMS_ROUNDED_LAST = NormKind(rounds_first=False)
GEMMA_RMS = NormKind(rounds_first=False, offset=1.0)
LAYER = NormKind(subtracts_mean=True)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts in place of the MLP.

    A checkpoint stores either the tensors `gate`, `up` and `down` of each expert under
    `experts.N.`, or two tensors for all experts, named by `merged`: gate and up together, and down.
    Without a gate, `gate` is "".
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    merged: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    shared: str = ""
    """Shared experts: one MLP that sees every token."""
    shared_is_beside: bool = False
    """Whether the shared MLP is stored beside the mixture, not in it."""
    gates_shared: bool = False
    """Whether the output of the shared MLP is multiplied by the sigmoid of its own gate."""
    score: Literal["softmax", "softmax of top k", "sigmoid", "sparse mixer", "by config"] = (
        "softmax"
    )
    """How a router's logits become scores; see `engine.model.mixtures.router`. "by config": as
    config.expert_selection_fn says, "softmax" (of the top k) or "sigmoid"."""
    bias: str = ""
    """A bias of the scores that takes part in the choice of experts, not in their weights."""
    group_score: Literal["two best", "best"] = "two best"
    """With config.n_group, tokens choose within the best groups: those whose two best experts, or
    whose best, have the highest score."""
    top_k: str = "num_experts_per_tok"
    """The config's number of experts of a token."""
    scaling: str = "routed_scaling_factor"
    """The config's factor on the scores."""
    routes_in_fp32: bool = False
    """Whether the router computes in fp32 in models of low precision."""
    always_normalizes: bool = False
    """Always normalize the top k scores to sum to 1, even without config.norm_topk_prob."""
    least_sum: float = 1e-20
    """Added to a sum of sigmoids before a division by it; DeepSeek's by default."""
    latents: tuple[str, str] = ("", "")
    """With config.moe_latent_size, the linear layers before and after the experts."""
    is_interleaved: bool = False
    """Whether the experts are stored as gpt-oss's: the merged tensors are [experts, in, out], and
    the outputs of gate and up alternate. Such experts clamp both."""


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
    """One name if the checkpoint merges them into one tensor."""
    out: str = "o_proj"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name if both are one tensor, or if the MLP has no gate; see `is_gated`."""
    down: str = "down_proj"
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """Before attention, after it, before the MLP, after it; "" where the layer has no norm."""
    renames: tuple[tuple[str, str], ...] = ()
    """Replacements in tensor names: (as published, as in transformers' modules and PEFT)."""

    # Layers
    norm: NormKind = RMS
    is_rms_by_config: bool = False
    """Whether norms are Llama's RMSNorm if the config has an rms_norm_eps."""
    qk_norm: Literal["", "head", "row", "after rotary"] = ""
    """Normalize queries and keys: per head, all heads as one row, or per head after rotation."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_is_optional: bool = False
    """Whether config.use_qk_norm switches q/k norms on."""
    windows: Literal["none", "all", "by layer"] = "none"
    """Which layers use config.sliding_window; "by layer": as config.layer_types says."""
    rotary: Literal["halves", "pairs", "none"] = "halves"
    """Which elements of a head rotate together: i and i + half, or 2i and 2i + 1."""
    scales_queries: bool = False
    """Multiply queries by a factor that grows with their position."""
    rotates_only_windows: bool = False
    """Apply rotary embedding only in sliding-window layers, if the model has any, and in the first
    dense layers if config.prefix_dense_sliding_window_pattern is 1."""
    is_gated: bool = True
    is_parallel: bool = False
    """Attention and MLP read the same input and are both added to it. The config's
    use_parallel_residual overrides this if present."""
    parallel_shares_norm: bool = False
    """In a parallel layer, the MLP shares attention's norm (StableLM)."""
    gates_attention: bool = False
    """Multiply attention's output by the sigmoid of gates, which `q_proj` has after the queries of
    each head."""
    has_latents: bool = False
    """Whether attention is `engine.model.latent_attention`, whose tensors have fixed names."""
    state: str = ""
    """Name of the part that takes attention's place, or stands beside it, in layers that keep a
    state; see `engine.model.mixers`."""
    has_one_part: bool = False
    """Whether a layer is one part and the norm before it; see `engine.model.mixers.one_part`."""
    has_multipliers: bool = False
    """Whether the config has factors for linear layers; see `engine.model.mixers.multipliers`."""
    is_gemma4: bool = False
    """Whether layers are those of `engine.model.gemma4`, whose tensors have fixed names."""
    experts: ExpertNames | None = None
    scales_embedding: bool = False
    """Multiply embeddings by the square root of the hidden size (Gemma)."""
    position_embedding: str = ""
    """Name of the learned position embedding, if there is one."""
    position_offset: int = 0
    """Added to positions before they are looked up in the position embedding."""
    is_transposed: bool = False
    """Linear weights are stored as [in, out] (GPT-2)."""
    qkv_by_head: bool = False
    """The merged qkv tensor holds q, k and v of head 0, then of head 1, ... (GPT-NeoX)."""


LLAMA = Family()
BY_LAYER = replace(LLAMA, windows="by layer")
SANDWICH = ("input_layernorm", "post_attention_layernorm",
            "pre_feedforward_layernorm", "post_feedforward_layernorm")  # fmt: skip
POST = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GEMMA = replace(LLAMA, norm=GEMMA_RMS, scales_embedding=True)
OLMO2 = replace(LLAMA, norm=RMS_ROUNDED_LAST, norms=POST, qk_norm="row")
LFM2 = replace(
    LLAMA, state="conv", norms=("operator_norm", "", "ffn_norm", ""), final_norm="embedding_norm",
    mlp="feed_forward", gate_up=("w1", "w3"), down="w2", out="out_proj",
    qk_norm="head", qk_norm_names=("q_layernorm", "k_layernorm"),
)  # fmt: skip
BAMBA = replace(
    LLAMA, state="mamba", norms=("input_layernorm", "", "pre_ff_layernorm", ""),
    mlp="feed_forward", final_norm="final_layernorm",
)  # fmt: skip
QWEN_STATE = replace(
    GEMMA, scales_embedding=False, state="linear_attn", qk_norm="head", gates_attention=True
)
SHARED_EXPERT = ExpertNames(shared="shared_expert", gates_shared=True)
GLM = replace(LLAMA, rotary="pairs", gate_up=("gate_up_proj",))
HUNYUAN = replace(LLAMA, qk_norm="after rotary", qk_norm_names=("query_layernorm", "key_layernorm"))
QWEN_EXPERTS = ExpertNames()
DEEPSEEK_EXPERTS = ExpertNames(
    score="sigmoid", bias="gate.e_score_correction_bias", shared="shared_experts",
    routes_in_fp32=True,
)  # fmt: skip
UNGATED = replace(LLAMA, is_gated=False, gate_up=("up_proj",))
ONE_PART = replace(
    UNGATED, has_one_part=True, norms=("norm", "", "", ""), embedding="embeddings",
    final_norm="norm_f", state="mixer", attention="mixer", mlp="mixer", rotary="none",
)  # fmt: skip
MAMBA = replace(
    ONE_PART, prefix="backbone.", renames=(("backbone.embedding.", "backbone.embeddings."),)
)
COHERE = replace(
    LLAMA, norm=LAYER, rotary="pairs", is_parallel=True, norms=("input_layernorm", "", "", "")
)
COHERE2 = replace(COHERE, windows="by layer", rotates_only_windows=True)
LATENT = replace(LLAMA, has_latents=True, rotary="pairs")
GEMMA4 = replace(
    LLAMA, norm=RMS_ROUNDED_LAST, norms=SANDWICH, qk_norm="head", windows="by layer",
    scales_embedding=True, is_gemma4=True,
    experts=ExpertNames(router="router.proj", top_k="top_k_experts", always_normalizes=True),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, windows="all"),
    "ministral": BY_LAYER,
    "ministral3": replace(LLAMA, windows="all", scales_queries=True),
    "qwen2": BY_LAYER,
    "smollm3": BY_LAYER,
    "seed_oss": LLAMA,
    "granite": LLAMA,
    "qwen3": replace(BY_LAYER, qk_norm="head"),
    "phi3": replace(LLAMA, qkv=("qkv_proj",), gate_up=("gate_up_proj",), windows="all"),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, norms=SANDWICH, windows="by layer"),
    "gemma3_text": replace(GEMMA, norms=SANDWICH, qk_norm="head", windows="by layer"),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": replace(GEMMA4, experts=None),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, windows="by layer"),
    "exaone4": replace(BY_LAYER, norms=POST, qk_norm="head", rotates_only_windows=True),
    "helium": replace(LLAMA, norm=RMS_ROUNDED_LAST, rotary="pairs"),
    "ernie4_5": replace(LLAMA, rotary="pairs"),
    "glm": GLM,
    "glm4": replace(
        GLM,
        norms=("input_layernorm", "post_self_attn_layernorm",
               "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "hunyuan_v1_dense": HUNYUAN,
    # No gate in the MLP
    "arcee": UNGATED,
    "apertus": replace(
        UNGATED, qk_norm="head", norms=("attention_layernorm", "", "feedforward_layernorm", "")
    ),
    "nemotron": replace(UNGATED, norm=NormKind(subtracts_mean=True, offset=1.0)),
    "phi": replace(
        UNGATED, norm=LAYER, is_parallel=True, norms=("input_layernorm", "", "", ""),
        final_norm="final_layernorm", out="dense", gate_up=("fc1",), down="fc2",
    ),
    "starcoder2": replace(UNGATED, norm=LAYER, gate_up=("c_fc",), down="c_proj", windows="all"),
    # LayerNorm
    "stablelm": replace(LLAMA, norm=LAYER, parallel_shares_norm=True),
    "cohere": replace(COHERE, qk_norm="head", qk_norm_is_optional=True),
    "cohere2": COHERE2,
    "gpt2": Family(
        prefix="transformer.", layers="h", embedding="wte", final_norm="ln_f",
        attention="attn", qkv=("c_attn",), out="c_proj", gate_up=("c_fc",), down="c_proj",
        norms=("ln_1", "", "ln_2", ""), norm=LAYER, rotary="none", is_gated=False,
        position_embedding="wpe", is_transposed=True,
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
        norm=LAYER, rotary="none", is_gated=False,
        position_embedding="embed_positions", position_offset=2,
    ),
    # Layers with a state
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2,
        experts=ExpertNames(
            block="feed_forward", gate="w1", up="w3", down="w2", score="sigmoid",
            bias="expert_bias", least_sum=1e-6,
        ),
    ),
    "granitemoehybrid": replace(
        LLAMA,
        state="mamba", mlp="shared_mlp", gate_up=("input_linear",), down="output_linear",
        experts=ExpertNames(
            block="block_sparse_moe", router="router", score="softmax of top k",
            shared="shared_mlp", shared_is_beside=True,
        ),
        renames=(
            (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
            (".router.layer.", ".router."),
        ),
    ),
    "bamba": BAMBA,
    "falcon_h1": replace(BAMBA, has_multipliers=True),
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": MAMBA,
    "nemotron_h": replace(
        ONE_PART,
        norm=RMS_ROUNDED_LAST,
        experts=replace(
            DEEPSEEK_EXPERTS, block="mixer", gate="",
            merged=("experts.up_proj", "experts.down_proj"),
            latents=("fc1_latent_proj", "fc2_latent_proj"),
        ),
        renames=(("backbone.", "model."),),
    ),
    "qwen3_next": replace(QWEN_STATE, experts=SHARED_EXPERT),
    "qwen3_5_text": QWEN_STATE,
    "qwen3_5_moe_text": replace(
        QWEN_STATE, experts=replace(SHARED_EXPERT, always_normalizes=True)
    ),
    # Mixtures of experts
    "mixtral": replace(
        LLAMA,
        experts=ExpertNames(gate="w1", up="w3", down="w2", always_normalizes=True),
        renames=((".block_sparse_moe.", ".mlp."),),
        windows="all",
    ),
    "qwen2_moe": replace(
        BY_LAYER, experts=ExpertNames(shared="shared_expert", gates_shared=True)
    ),
    "qwen3_moe": replace(LLAMA, qk_norm="head", experts=QWEN_EXPERTS, windows="all"),
    "mellum": replace(BY_LAYER, qk_norm="head", experts=QWEN_EXPERTS),
    "olmoe": replace(LLAMA, qk_norm="row", experts=QWEN_EXPERTS),
    "granitemoe": replace(
        LLAMA,
        experts=ExpertNames(block="block_sparse_moe", router="router", score="softmax of top k"),
        renames=(
            (".input_linear.weight", ".experts.gate_up_proj"),
            (".output_linear.weight", ".experts.down_proj"),
            (".router.layer.", ".router."),
        ),
    ),
    "gpt_oss": replace(
        BY_LAYER,
        norm=RMS_ROUNDED_LAST,
        experts=ExpertNames(router="router", score="softmax of top k", is_interleaved=True),
    ),
    "phimoe": replace(
        LLAMA,
        norm=LAYER,
        experts=ExpertNames(router="router", gate="w1", up="w3", down="w2", score="sparse mixer"),
        renames=((".block_sparse_moe.gate.", ".mlp.router."), (".block_sparse_moe.", ".mlp.")),
        windows="all",
    ),
    "cohere2_moe": replace(
        COHERE2,
        is_rms_by_config=True,
        experts=ExpertNames(score="by config", shared="shared_experts", least_sum=0.0),
    ),
    # Mixtures with DeepSeek's router
    "glm4_moe": replace(
        LLAMA, qk_norm="head", qk_norm_is_optional=True, experts=DEEPSEEK_EXPERTS
    ),
    "deepseek_v2": replace(
        LATENT, experts=replace(DEEPSEEK_EXPERTS, score="softmax", bias="", group_score="best")
    ),
    "deepseek_v3": replace(LATENT, experts=DEEPSEEK_EXPERTS),
    "glm4_moe_lite": replace(LATENT, experts=DEEPSEEK_EXPERTS),
    "youtu": LATENT,
    "mistral4": replace(
        LATENT,
        scales_queries=True,
        experts=replace(DEEPSEEK_EXPERTS, score="softmax", bias="", routes_in_fp32=False),
    ),
    "dots1": replace(BY_LAYER, qk_norm="head", experts=DEEPSEEK_EXPERTS),
    "solar_open": replace(LLAMA, experts=DEEPSEEK_EXPERTS),
    "exaone_moe": replace(
        BY_LAYER,
        qk_norm="head",
        rotates_only_windows=True,
        experts=DEEPSEEK_EXPERTS,
        renames=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    ),
    "minimax_m2": replace(
        LLAMA,
        qk_norm="row",
        experts=ExpertNames(
            gate="w1", up="w3", down="w2", score="sigmoid", bias="e_score_correction_bias",
            always_normalizes=True,
        ),
        renames=((".block_sparse_moe.", ".mlp."),),
    ),
    "ernie4_5_moe": replace(
        LLAMA,
        rotary="pairs",
        experts=replace(
            DEEPSEEK_EXPERTS, score="softmax", bias="gate.moe_statics.e_score_correction_bias",
            always_normalizes=True,
        ),
        renames=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
    ),
    "hunyuan_v1_moe": replace(
        HUNYUAN,
        experts=ExpertNames(
            router="gate.wg", shared="shared_mlp", routes_in_fp32=True, always_normalizes=True
        ),
    ),
    "hy_v3": replace(
        LLAMA,
        qk_norm="head",
        experts=replace(
            DEEPSEEK_EXPERTS, bias="e_score_correction_bias", scaling="router_scaling_factor",
            always_normalizes=True,
        ),
        renames=(
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
            (".mlp.shared_mlp.", ".mlp.shared_experts."),
        ),
    ),
}  # fmt: skip
"""Keyed by `model_type` in config.json. Other families run on transformers' own code."""

TEXT_ALONE = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
"""Language models inside others, by the family that they are for text alone. Time, row and column
of a token are then the same, so M-RoPE is the usual rotation."""
