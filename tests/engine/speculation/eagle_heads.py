"""Tiny EAGLE-3 heads in the published format, and their reference in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.speculation.heads import LIKELY, favour
from tests.engine.tiny_models import VOCABULARY

WIDTH, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, MLP = 128, 32, 4, 2, 96
DRAFT_VOCABULARY = 40
CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
          "num_hidden_layers": 1, "vocab_size": VOCABULARY,
          "draft_vocab_size": DRAFT_VOCABULARY, "hidden_size": WIDTH,
          "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS,
          "head_dim": HEAD_DIM, "intermediate_size": MLP, "hidden_act": "silu",
          "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 10000.0,
          "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 0}  # fmt: skip


class Reference:
    def __init__(self, model: Path, weights: dict[str, Tensor], layers: tuple[int, ...]) -> None:
        """layers: the head reads what is before these layers."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.weights, self.layers = weights, layers

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        model, weights = self.model.model, self.weights
        given = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([given[index][0] for index in self.layers], -1) @ weights["fc.weight"].T
        embed: Any = weights.get("embed_tokens.weight", model.embed_tokens.weight)
        drafts: list[int] = []
        for _ in range(count):
            newest = self._layer(embed[[*tokens, *drafts][1:]], states)[-1:]
            best = int((self._norm(newest, "norm") @ weights["lm_head.weight"].T).argmax())
            drafts.append(best + int(weights["d2t"][best]))
            states = torch.cat([states, newest])
        return drafts

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return F.rms_norm(rows, (WIDTH,), self.weights[f"{name}.weight"], 1e-5)

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        def project(rows: Tensor, name: str) -> Tensor:
            return rows @ self.weights[f"midlayer.{name}_proj.weight"].T

        normed = [self._norm(embedded, "midlayer.input_layernorm")]
        both = torch.cat([*normed, self._norm(states, "midlayer.hidden_norm")], -1)
        query, key, value = (
            project(both, f"self_attn.{name}").unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
            for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(
            _rotated(query), _rotated(key), value, is_causal=True, enable_gqa=True
        )
        hidden = states + project(attended.transpose(0, 1).flatten(1), "self_attn.o")
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        inner = F.silu(project(normed, "mlp.gate")) * project(normed, "mlp.up")
        return hidden + project(inner, "mlp.down")


def _rotated(rows: Tensor) -> Tensor:
    """rows: [heads, T, HEAD_DIM]."""
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(rows.shape[1]), frequencies)
    first, second = rows.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def write_head(
    model: Path, folder: Path, layers: tuple[int, ...], **changes: object
) -> tuple[Path, Reference]:
    """Write a head of this model, whose answers from now on are mostly of likely tokens.

    layers: that it reads what is before. changes: of its config.
    """
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = favour(weights["lm_head.weight"])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(5)
    likely = torch.arange(VOCABULARY)[LIKELY]
    others = torch.randperm(VOCABULARY)
    others = others[~torch.isin(others, likely)][: DRAFT_VOCABULARY - len(likely)]
    tokens = torch.cat([likely, others]).sort().values
    kv = NUM_KV_HEADS * HEAD_DIM
    shapes = {
        "fc": (WIDTH, len(layers) * WIDTH), "lm_head": (DRAFT_VOCABULARY, WIDTH),
        "midlayer.self_attn.q_proj": (NUM_HEADS * HEAD_DIM, 2 * WIDTH),
        "midlayer.self_attn.k_proj": (kv, 2 * WIDTH),
        "midlayer.self_attn.v_proj": (kv, 2 * WIDTH),
        "midlayer.self_attn.o_proj": (WIDTH, NUM_HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (MLP, WIDTH), "midlayer.mlp.up_proj": (MLP, WIDTH),
        "midlayer.mlp.down_proj": (WIDTH, MLP),
    }  # fmt: skip
    head = {
        f"{name}.weight": torch.randn(shape) * 1.4 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    head["lm_head.weight"][torch.isin(tokens, likely)] *= 5
    for name in ("norm", *(f"midlayer.{name}" for name in (
        "hidden_norm", "input_layernorm", "post_attention_layernorm"))):  # fmt: skip
        head[f"{name}.weight"] = 1 + 0.2 * torch.randn(WIDTH)
    head["d2t"] = tokens - torch.arange(DRAFT_VOCABULARY)
    head["t2d"] = torch.isin(torch.arange(VOCABULARY), tokens)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, Reference(model, head, layers)
