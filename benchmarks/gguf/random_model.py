"""Small mixtures of experts with random weights and the demo model's tokenizer.

There is no trained one that is small. Weights are large enough for routers to have preferences.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cpu.http_server import ROOT

DEMO = ROOT / "models" / "demo"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SIZES: Mapping[str, Any] = {
    "vocab_size": 1536, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "granitemoe": EXPERTS
    | {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
        "attention_multiplier": 0.1,
    },
    # llama.cpp rounds where frequencies begin to be scaled, so none are.
    "gpt_oss": EXPERTS
    | {"sliding_window": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
"""What each of transformers' model types has besides SIZES."""


def write_random(kind: str, folder: Path) -> Path:
    """Write the mixture of a model type, unless it exists. Returns its directory."""
    model_dir = folder / f"random-{kind}"
    if (model_dir / TOKENIZER[0]).exists():
        return model_dir
    import torch  # only here: they take seconds
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    for name in reversed(TOKENIZER):  # the first one is written last: then the model is whole
        shutil.copy(DEMO / name, model_dir)
    return model_dir
