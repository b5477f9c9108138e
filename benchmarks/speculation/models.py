"""Models for `benchmarks.speculation`, among them a draft model that is always right.

It is the first layers of a model whose later layers add nothing to what these compute, but take as
long as before. So drafts cost what those of a good draft model cost, and what they gain does not
depend on anybody's training.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.cpu.model import write_model
from benchmarks.cpu.shapes import SHAPES

LAYER = re.compile(r"model\.layers\.(\d+)\.")
ENDS = re.compile(r"(self_attn\.o_proj|mlp\.down_proj)\.(weight|bias)$")
"""What a layer adds to the residual is the output of these products."""
FILE = "model.safetensors"


def model_of(name: str, folder: Path) -> Path:
    """Return a model's directory: the name, unless it is a shape of `benchmarks.cpu.shapes`.

    Such a model is written with random weights, into the folder.
    """
    if name not in SHAPES or Path(name).is_dir():
        return Path(name)
    write_model(name, folder / name)
    return folder / name


def write_models(source: Path, num_layers: int, folder: Path) -> tuple[Path, Path]:
    """Write the model and the draft model of so many layers. Return their directories.

    source: a model in one file, with Llama's names of tensors. Raises SystemExit if it is another
    one, or has no more layers than that.
    """
    if not (source / FILE).is_file():
        raise SystemExit(f"{source}: no directory with {FILE}, and none of {', '.join(SHAPES)}")
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
