"""EAGLE-3 heads (Li et al., 2025), in the format that SafeAILab publishes.

```
fc(three layers' outputs)  ──┬─ hidden_norm ─────┬─▶ attention ─▶ + ─▶ norm, MLP ─▶ + ─▶ lm_head
embedding of the next token ─│─ input_layernorm ─┘                ▲
                             └────────────────────────────────────┘
```

The files of the head have a Llama config and the tensors above, `midlayer.*`. The head predicts
some of the vocabulary: its token i is the model's token `i + d2t[i]`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from core.errors import ConfigurationError
from engine.model.checkpoint import open_renamed
from engine.model.decoder import Decoder
from engine.model.layer import MLP, Attention
from engine.model.loader import Loader, Source
from engine.model.norms import add_and_norm
from engine.model.published.settings import read_spec
from engine.model.rotary import Rotary
from engine.model.spec import DecoderSpec
from engine.speculation.heads.head import BlockInputs, Ends, Head, joined
from engine.speculation.heads.hidden_states import Fusion

KEY = "option.speculative_draft_model"
LAYER = "model.layers.0"
PUBLISHED_LAYERS = ("midlayer.", "layers.0.")
MODELS = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
"""Types of models whose layers leave what heads were trained on."""


def load_eagle3(
    decoder: Decoder, directory: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[Head, Fusion, int]:
    """Load the head in this directory. Return it, how its states are made, and its bytes.

    decoder: of the model. config: of the head.

    Raises ConfigurationError if the head is of another kind, or of another model.
    """
    model = decoder.spec
    if model.model_type not in MODELS:
        raise ConfigurationError(
            f"option.speculative_method=eagle3 runs with models of type {', '.join(MODELS)}, not "
            f"{model.model_type}; choose another method"
        )
    spec = read_spec(config, model.max_length)
    if len(spec.layers) != 1:
        raise ConfigurationError(
            f"{KEY}={directory}: its config.json has {len(spec.layers)} layers, but an EAGLE-3 "
            "head has one; set option.speculative_method=draft_model for a whole model"
        )
    checkpoint = open_renamed(directory, _own_name)
    checkpoint.keep(lambda name: name != "t2d")  # which tokens d2t has
    loader = Loader(checkpoint, decoder.embedding.device, dtype)
    layers = _layers(config, len(model.layers))
    fc = loader.linear([Source("fc", spec.hidden_size)], len(layers) * model.hidden_size)
    rotary = Rotary(spec, loader.device, dtype)
    block = _Block(loader, spec, config, rotary)
    norm = loader.norm("norm", (spec.hidden_size,), spec.family.norm, spec.norm_eps)
    ends = Ends(
        loader.device,
        _embedding(loader, spec, decoder),
        _logits(loader, spec, decoder),
        chains_normed=getattr(config, "norm_output", False),
    )
    checkpoint.require_all_taken(except_for="")
    return Head(block, norm, rotary, ends, spec), Fusion(layers, fc), loader.num_bytes


def _own_name(name: str) -> str:
    for published in PUBLISHED_LAYERS:
        if name.startswith(published):
            return f"{LAYER}.{name.removeprefix(published)}"
    return name


def _layers(config: Any, count: int) -> tuple[int, ...]:
    """Return the layers whose outputs the head reads. count: those of the model.

    Configs of speculators number what a layer reads, those of ModelOpt what it leaves.
    """
    read = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    inner = getattr(config, "eagle_config", None) or {}
    left = inner.get("eagle_aux_hidden_state_layer_ids")
    if read is None:
        read = [2, count // 2, count - 3] if left is None else [index + 1 for index in left]
    layers = tuple(index - 1 for index in sorted(set(read)))
    if layers[0] < 0 or layers[-1] >= count:
        raise ConfigurationError(
            f"{KEY}: the head reads what is before layers {sorted(read)}, but the model has {count}"
            " layers; choose a head that was trained for the model"
        )
    return layers


class _Block:
    def __init__(self, loader: Loader, spec: DecoderSpec, config: Any, rotary: Rotary) -> None:
        width, kind, eps = spec.hidden_size, spec.family.norm, spec.norm_eps
        self._embedding_norm, self._state_norm, self._norm = (
            loader.norm(f"{LAYER}.{name}", (width,), kind, eps)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        name = f"{LAYER}.{spec.family.attention}"
        self._attention = Attention(loader, spec, 0, name, rotary, in_features=2 * width)
        self._mlp = MLP(loader, spec, f"{LAYER}.{spec.family.mlp}", spec.layers[0].mlp_width)
        self._adds_normed: bool = getattr(config, "norm_before_residual", False)

    def __call__(self, inputs: BlockInputs) -> tuple[Tensor, Tensor | None]:
        normed = self._state_norm(inputs.states)
        both = joined(self._embedding_norm(inputs.embedded), normed)
        attended = self._attention(both, inputs.angles, inputs.paged, inputs.rows)
        hidden = normed if self._adds_normed else inputs.states
        if inputs.rows is not None:
            hidden = hidden.index_select(0, inputs.rows)
        hidden, normed = add_and_norm(hidden, attended, self._norm)
        return hidden, self._mlp(normed)


def _embedding(
    loader: Loader, spec: DecoderSpec, decoder: Decoder
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the head's embedding: the model's, unless its files have another one."""
    name, width = "embed_tokens.weight", spec.hidden_size
    if name in loader.checkpoint:
        stored = loader.checkpoint.take(name, spec.vocab_size, width)
        if not torch.equal(stored.to(loader.device, loader.dtype), decoder.embedding):
            table = loader.place(stored)
            return lambda token_ids, positions: F.embedding(token_ids, table)
    if width != decoder.spec.hidden_size:
        raise ConfigurationError(
            f"{KEY}: the head's hidden size is {width}, that of the model "
            f"{decoder.spec.hidden_size}; choose a head that was trained for the model"
        )
    return decoder.embed


def _logits(loader: Loader, spec: DecoderSpec, decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """Return the head's output projection, to the model's whole vocabulary."""
    if "lm_head.weight" not in loader.checkpoint:
        return decoder.logits
    config: Any = spec.config
    count = getattr(config, "draft_vocab_size", None) or spec.vocab_size
    project = loader.linear([Source("lm_head", count)], spec.hidden_size, may_quantize=False)
    if "d2t" not in loader.checkpoint:
        return project
    offsets = loader.checkpoint.take_stored("d2t", torch.int64).to(loader.device)
    tokens = torch.arange(count, device=loader.device) + offsets

    def logits(normed: Tensor) -> Tensor:
        some = project(normed)
        # Not infinity: if a request allows only other tokens, there must be a most likely one.
        lowest = torch.finfo(some.dtype).min
        every = some.new_full((len(some), spec.vocab_size), lowest)
        return every.index_copy_(1, tokens, some)

    return logits
