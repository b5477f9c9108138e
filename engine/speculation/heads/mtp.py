"""The layer of multi-token prediction that a checkpoint has beside the model's own (DeepSeek-V3).

`layer(project([norm(embedding of a token), norm(state before it)]))`: the layer is of the model's
own kind, and the state is the output of the model's final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from core.errors import ConfigurationError
from engine.model.checkpoint import Checkpoint, open_renamed
from engine.model.decoder import Decoder
from engine.model.layer import Layer
from engine.model.loader import Loader, Source
from engine.model.rotary import Rotary
from engine.model.spec import DecoderSpec
from engine.speculation.heads.head import BlockInputs, Ends, Head, joined


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the parts beside the layer itself, whose names are the model's."""

    parts: Mapping[str, str]
    """What names begin with, and what takes its place here, so that the layer is layer 0. {count}:
    the number of the model's layers."""
    embedding_norm: str
    state_norm: str
    project: str
    norm: str = ""
    """The norm after the layer; '': the model's own."""
    shared: tuple[str, ...] = ()
    """Tensors that the model has already, and that are not read."""


QWEN = Names(
    parts={"mtp.": "model."},
    embedding_norm="model.pre_fc_norm_embedding",
    state_norm="model.pre_fc_norm_hidden",
    project="model.fc",
    norm="model.norm",
)
DEEPSEEK = Names(
    parts={"model.layers.{count}.": "model.layers.0."},
    embedding_norm="model.layers.0.enorm",
    state_norm="model.layers.0.hnorm",
    project="model.layers.0.eh_proj",
    norm="model.layers.0.shared_head.norm",
    shared=("model.layers.0.embed_tokens.", "model.layers.0.shared_head.head."),
)
ERNIE = Names(
    parts={
        "model.mtp_block.0.": "model.layers.0.",
        "model.mtp_emb_norm.0.": "model.mtp_emb_norm.",
        "model.mtp_hidden_norm.0.": "model.mtp_hidden_norm.",
        "model.mtp_linear_proj.0.": "model.mtp_linear_proj.",
    },
    embedding_norm="model.mtp_emb_norm",
    state_norm="model.mtp_hidden_norm",
    project="model.mtp_linear_proj",
)
"""As Baidu's FastDeploy reads the files, where the layer has no experts."""
NAMES: Mapping[str, Names] = {
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "ernie4_5_moe": ERNIE,
}
"""Keyed by `model_type`, of the text model."""
CURE = "choose another option.speculative_method, or leave it out"


def load_mtp(
    decoder: Decoder, model_dir: Path, make_loader: Callable[[Checkpoint], Loader]
) -> tuple[Head, int]:
    """Load the head of the model in this directory. Return it, and the bytes of its weights.

    Of several layers, the first one makes all drafts. make_loader: loads as the model was loaded.

    Raises ConfigurationError if the model has none, or if its tensors do not fit.
    """
    spec = decoder.spec
    names = NAMES.get(spec.model_type)
    if names is None:
        raise ConfigurationError(
            "option.speculative_method=mtp: no multi-token prediction is known of models of type "
            f"{spec.model_type}, but of {', '.join(NAMES)}; {CURE}"
        )
    checkpoint = open_renamed(model_dir, _renaming(names, len(spec.layers)))
    if f"{names.project}.weight" not in checkpoint:
        raise ConfigurationError(
            f"option.speculative_method=mtp: the files in {model_dir} have no layer of multi-token "
            f"prediction; {CURE}"
        )
    checkpoint.keep(lambda name: not name.startswith(names.shared))
    loader = make_loader(checkpoint)
    own = _spec_of(spec, checkpoint)
    rotary = Rotary(own, loader.device, loader.dtype)
    block = _Block(loader, own, names, rotary)
    norm = decoder.norm
    if names.norm:
        norm = loader.norm(names.norm, (own.hidden_size,), own.family.norm, own.norm_eps)
    checkpoint.require_all_taken(except_for="")
    ends = Ends(loader.device, decoder.embed, decoder.logits)
    return Head(block, norm, rotary, ends, own), loader.num_bytes


def _renaming(names: Names, num_layers: int) -> Callable[[str], str | None]:
    parts = {part.format(count=num_layers): own for part, own in names.parts.items()}

    def rename(name: str) -> str | None:
        found = (part for part in parts if name.startswith(part))
        return next((parts[part] + name.removeprefix(part) for part in found), None)

    return rename


def _spec_of(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """Return the spec of a model with the head's layer only. It attends to all tokens."""
    last = [layer for layer in spec.layers if layer.has_attention and layer.window is None][-1]
    experts = spec.family.experts
    block = "" if experts is None else f"{spec.family.prefix}{spec.family.layers}.0.{experts.block}"
    has_experts = bool(block) and any(
        name.startswith(f"{block}.experts.") for name in checkpoint.names()
    )
    return replace(spec, layers=(replace(last, has_experts=has_experts),))


class _Block:
    def __init__(self, loader: Loader, spec: DecoderSpec, names: Names, rotary: Rotary) -> None:
        width, kind, eps = spec.hidden_size, spec.family.norm, spec.norm_eps
        self._embedding_norm = loader.norm(names.embedding_norm, (width,), kind, eps)
        self._state_norm = loader.norm(names.state_norm, (width,), kind, eps)
        self._project = loader.linear([Source(names.project, width)], 2 * width)
        self._layer = Layer(loader, spec, 0, rotary)

    def __call__(self, inputs: BlockInputs) -> tuple[Tensor, Tensor | None]:
        both = joined(self._embedding_norm(inputs.embedded), self._state_norm(inputs.states))
        return self._layer(self._project(both), None, inputs.angles, inputs.paged, inputs.rows)
