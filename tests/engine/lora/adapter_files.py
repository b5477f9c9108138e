"""Random LoRA adapters in PEFT's format, and models with adapters merged into their weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from engine import LLM
from engine.lora.adapter_registry import AdapterRegistry
from tests.engine.tiny_models import decoder_class

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZE = 0.3
"""Scale of B @ A: enough to change most greedy tokens of a tiny model."""


def adapted_llm(path, **options):
    return LLM(path, enable_lora=True, **{"dtype": "fp32", "block_size": 4} | options)


def registry(engine):
    return AdapterRegistry.of(engine.features)


def layers_of(model, targets):
    """Return the linear layers whose names end so, and whether their weights are [in, out]."""
    return {
        name: (module, isinstance(module, Conv1D))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and f".{name}".endswith(tuple(f".{target}" for target in targets))
    }


def write_adapter(model, folder, *, rank=3, alpha=6, targets=TARGETS, seed=1, kind=None, **config):
    """Write an adapter for the model in the folder `model` to `folder`."""
    layers = layers_of(_load(model, kind), targets)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (layer, is_transposed) in layers.items():
        shape = layer.weight.T.shape if is_transposed else layer.weight.shape
        a = torch.randn(rank, shape[1], generator=generator) / shape[1] ** 0.5
        b = torch.randn(shape[0], rank, generator=generator) * SIZE
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    assert tensors, "the model has none of these layers"
    return write_files(folder, tensors, r=rank, lora_alpha=alpha, **config)


def write_files(folder, tensors, **config):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def read_files(folder):
    from safetensors.torch import load_file

    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    return load_file(Path(folder) / "adapter_model.safetensors"), config


@torch.no_grad()
def merged(model, adapter, folder, kind=None):
    """Write a copy of the model to `folder`: with weights `W + alpha / r * B @ A`, and its modules
    replaced by those that the adapter saves whole."""
    tensors, config = read_files(adapter)
    divisor = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    whole = _load(model, kind)
    modules = dict(whole.named_modules())
    for key, a in tensors.items():
        name, _, side = key.removeprefix("base_model.model.").partition(".lora_")
        if not side:
            whole.get_parameter(name).copy_(a)
        elif side == "A.weight":
            b = tensors[key.replace("lora_A", "lora_B")]
            delta = config["lora_alpha"] / divisor * b @ a
            layer = modules[name]
            layer.weight += delta.T if isinstance(layer, Conv1D) else delta
    whole.save_pretrained(folder)
    return Path(folder)


def _load(path, kind):
    kind = kind or decoder_class(AutoConfig.from_pretrained(path))
    return kind.from_pretrained(path, dtype=torch.float32)
