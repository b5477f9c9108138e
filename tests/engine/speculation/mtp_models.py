"""Tiny models whose files also have a layer of multi-token prediction, and its reference."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.speculation.heads import favour

QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc", "norm": "mtp.norm", "layer": "mtp.layers.0"}  # fmt: skip
DEEPSEEK = {"enorm": "model.layers.3.enorm", "hnorm": "model.layers.3.hnorm",
            "eh_proj": "model.layers.3.eh_proj", "norm": "model.layers.3.shared_head.norm",
            "layer": "model.layers.3"}  # fmt: skip
ERNIE = {"enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0",
         "eh_proj": "model.mtp_linear_proj.0", "layer": "model.mtp_block.0"}  # fmt: skip
"""Its layer has no experts, and the norm after it is the model's own."""
PUBLISHED = {"qwen3_next": QWEN, "qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN,
             "deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "ernie4_5_moe": ERNIE}  # fmt: skip


class Reference:
    """transformers' own layer of the model's kind, in plain torch: each call computes all anew."""

    def __init__(self, path: Path, names: dict[str, str]) -> None:
        """path: of a model, whose layer gets random weights. names: of its parts in files."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        config, layers = deepcopy(self.model.config), self.model.model.layers
        config.mlp_only_layers = []
        index = max(i for i, layer in enumerate(layers) if hasattr(layer, "self_attn"))
        index = 0 if names is ERNIE else index
        width = config.hidden_size
        norm = type(layers[index].input_layernorm)
        self.parts = torch.nn.ModuleDict(
            {
                **{name: norm(width, config.rms_norm_eps) for name in ("enorm", "hnorm", "norm")},
                "eh_proj": torch.nn.Linear(2 * width, width, bias=False),
                "layer": type(layers[index])(config, index),
            }
        ).eval()
        torch.manual_seed(3)
        with torch.no_grad():
            for name, weight in self.parts.state_dict().items():
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
                if "norm" in name:
                    weight.add_(1)
        self.norm = self.parts["norm"] if "norm" in names else self.model.model.norm
        self.names = names

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the most likely tokens after these, by the layer's own states of each."""
        model = self.model
        states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        drafts: list[int] = []
        for _ in range(count):
            embedded = model.model.embed_tokens(torch.tensor([[*tokens, *drafts][1:]]))
            normed = self._normed(embedded, states)[:, -1:]
            drafts.append(int(model.lm_head(normed).argmax()))
            states = torch.cat([states, normed], 1)
        return drafts

    def _normed(self, embedded: Tensor, states: Tensor) -> Tensor:
        parts, length = self.parts, embedded.shape[1]
        both = torch.cat([parts["enorm"](embedded), parts["hnorm"](states)], -1)
        hidden = parts["eh_proj"](both)
        positions = torch.arange(length)[None]
        output = parts["layer"](
            hidden,
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(hidden, position_ids=positions),
        )
        return self.norm(output)

    def published(self) -> dict[str, Tensor]:
        return {
            f"{self.names[part]}.{rest}": tensor.clone()
            for name, weight in self.parts.state_dict().items()
            for part, _, whole in [name.partition(".")]
            if part in self.names
            for rest, tensor in _of_experts(whole, weight)
        }


def _of_experts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor as published: one for each expert, and for gate and up."""
    if not name.endswith((".gate_up_proj", ".down_proj")) or weight.dim() < 3:
        yield name, weight
        return
    start, _, kind = name.rpartition(".")
    for index, expert in enumerate(weight):
        if kind == "down_proj":
            yield f"{start}.{index}.down_proj.weight", expert
            continue
        for part, rows in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
            yield f"{start}.{index}.{part}.weight", rows


def with_mtp(path: Path, folder: Path) -> tuple[Path, Reference]:
    """Copy a model to a folder, with a layer of multi-token prediction as its family has one."""
    config = json.loads((path / "config.json").read_text())
    names = PUBLISHED[config["model_type"]]
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"] = favour(weights["lm_head.weight"])
    if names is not QWEN:
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    if names is DEEPSEEK:
        weights["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.3.shared_head.head.weight"] = head.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reference = Reference(folder, names)
    weights |= reference.published()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, reference


def wrap(path: Path, folder: Path) -> Path:
    """Write a Qwen3.5 of text as the language model of one that takes images; return its folder."""
    shutil.copytree(path, folder)
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors").items()
    weights = {re.sub(r"^model\.", "model.language_model.", name): one for name, one in weights}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
