"""Models for `benchmarks.speculation`, whose drafts do not depend on anybody's training.

A draft model that is always right is the first layers of a model whose later layers add nothing to
what these compute, but take as long as before: its drafts cost what those of a good one cost.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cpu.model import write_model, write_tokenizer
from benchmarks.cpu.shapes import SHAPES
from benchmarks.gpu.shapes import SHAPES as LARGE_SHAPES
from benchmarks.gpu.shapes import Config, write_config

LAYER = re.compile(r"model\.layers\.(\d+)\.")
ENDS = re.compile(r"(self_attn\.o_proj|mlp\.down_proj)\.(weight|bias)$")
"""What a layer adds to the residual is the output of these products."""
FILE = "model.safetensors"
STD, NOTHING = 0.02, 1e-9
"""Deviations of random weights. Rounding drops what products with the latter add."""


def model_of(name: str, folder: Path) -> Path:
    """Return a model's directory: the name, unless it is a shape of `benchmarks.cpu` or `.gpu`.

    Such a model is written with random weights, into the folder.
    """
    if Path(name).is_dir():
        return Path(name)
    if name in LARGE_SHAPES:
        write_chain(LARGE_SHAPES[name], folder / name)
    elif name in SHAPES:
        write_model(name, folder / name)
    else:
        return Path(name)
    return folder / name


def write_chain(config: Config, folder: Path) -> None:
    """Write a model in bf16 whose token i is always followed by i + 1, by far the most likely one.

    Its layers take as long as any, and add nothing. So its answers are the same in every batch also
    where batches round differently, as on GPUs.
    """
    folder.mkdir(parents=True)
    write_config(config, folder)
    write_tokenizer(config["vocab_size"], folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        values = torch.ones(weight.shape, device=device)
        if weight.ndim > 1:
            values.normal_(0, NOTHING if ENDS.search(name) else STD, generator=random)
        weights[name] = values.bfloat16().cpu()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].roll(1, dims=0)
    save_file(weights, folder / FILE, metadata={"format": "pt"})


def write_models(source: Path, num_layers: int, folder: Path) -> tuple[Path, Path]:
    """Write the model and the draft model of so many layers. Return their directories.

    source: a model in one file, with Llama's names of tensors. Raises SystemExit if it is another
    one, or has no more layers than that.
    """
    if not (source / FILE).is_file():
        raise SystemExit(
            f"{source}: no directory with {FILE}, and none of {', '.join(SHAPES | LARGE_SHAPES)}"
        )
    config = json.loads((source / "config.json").read_text())
    most = config["num_hidden_layers"]
    if not 0 < num_layers < most:
        raise SystemExit(f"{source} has {most} layers, so a draft model has 1 to {most - 1}")
    with safe_open(source / FILE, "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    first = {name: weight for name, weight in weights.items() if _layer(name) < num_layers}
    ends = [name for name in weights.keys() - first.keys() if ENDS.search(name)]
    if len({_layer(name) for name in ends}) < most - num_layers:
        raise SystemExit(f"{source}: its tensors do not have Llama's names; choose another model")
    weights |= {name: torch.zeros_like(weights[name]) for name in ends}
    changes = {"num_hidden_layers": num_layers}
    if "layer_types" in config:
        changes["layer_types"] = config["layer_types"][:num_layers]
    paths = folder / "whole", folder / "draft"
    for path, tensors, changed in zip(paths, (weights, first), ({}, changes), strict=True):
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors", "draft"))
        (path / "config.json").write_text(json.dumps(config | changed))
        save_file(tensors, path / FILE, metadata={"format": "pt"})
    return paths


def _layer(name: str) -> int:
    """Return the layer of a tensor; -1 for those of none."""
    found = LAYER.match(name)
    return int(found[1]) if found else -1
