"""What drafts beside the model: a draft model, an EAGLE-3 head, or a layer of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from container.capacity.architecture import layer_parameters
from container.capacity.decoder import (
    DTYPE_BYTES,
    Decoder,
    Draft,
    decoder_from_directory,
    decoder_from_hub,
)
from container.capacity.mixers import mixed_layer_parameters
from core.configuration.options import Options
from core.errors import ConfigurationError
from core.states.layout import KINDS


def with_draft(decoder: Decoder, model_dir: Path, options: Options) -> Decoder:
    """Return the decoder, with what drafts for it if the options name something with weights.

    As in the engine, a relative path may begin in the model's directory, the dtype is the model's,
    and option.quantize applies only to a layer of the checkpoint. An EAGLE-3 head counts with all
    of its files, also an embedding that is the model's.

    Raises as `decoder_from_directory` and `decoder_from_hub`, and ConfigurationError if the
    checkpoint has no such layer.
    """
    method, name = options.speculation.chosen[0], options.speculation.draft_model
    if method == "mtp":
        return replace(decoder, draft=_own_layer(decoder))
    if name is None:
        return decoder
    found = _named(name, decoder, model_dir, options)
    what, of_states = "draft model", found.state_bytes
    draft = Draft(what, found.name, found.weights_bytes, found.shapes, row_bytes=of_states)
    if method == "eagle3":
        itemsize, num_bytes = DTYPE_BYTES[decoder.dtype], found.weights_bytes
        if not found.is_counted:
            num_bytes = _eagle3_parameters(found, decoder.hidden_size) * itemsize
        state_bytes = found.hidden_size * itemsize
        draft = Draft("head", found.name, num_bytes, found.shapes, state_bytes)
    return replace(decoder, draft=draft)


def _named(name: str, decoder: Decoder, model_dir: Path, options: Options) -> Decoder:
    """Return the decoder of option.speculative_draft_model, whose sums are fp32."""
    execution = replace(options.execution, dtype=cast(Any, decoder.dtype), quantize=None)
    source = replace(options.source, revision=None)
    memory = replace(options.memory, state_dtype="fp32")
    given = replace(options, execution=execution, source=source, memory=memory)
    path = Path(name).expanduser()
    for directory in (model_dir / path, path):
        if directory.is_dir():
            return decoder_from_directory(directory, given)
    return decoder_from_hub(name, given)


def _own_layer(decoder: Decoder) -> Draft:
    """Return the checkpoint's layer of multi-token prediction."""
    num_bytes = decoder.mtp_bytes
    if not decoder.is_counted:
        num_bytes = int(_mtp_parameters(decoder) * decoder.bytes_per_weight)
    shape = next((shape for shape in reversed(decoder.shapes) if shape.window is None), None)
    if not num_bytes or shape is None:
        raise ConfigurationError(
            f"option.speculative_method=mtp: {decoder.name} has no layer of multi-token "
            "prediction; choose another method, or leave it out"
        )
    state_bytes = decoder.hidden_size * DTYPE_BYTES[decoder.dtype]
    return Draft("head", "mtp", num_bytes, (shape,), state_bytes)


def _mtp_parameters(decoder: Decoder) -> int:
    """Return the parameters of a layer like the last one with attention, of norms of an embedding
    and of a state, and of the projection of both. ERNIE's layer is like its first, without experts.
    """
    config, sizes, last = decoder.settings, decoder.sizes, decoder.num_layers - 1
    if config.get("model_type") in KINDS:
        layer = mixed_layer_parameters(config, sizes, "full_attention", last)
    else:
        is_ernie = config.get("model_type") == "ernie4_5_moe"
        layer = layer_parameters(config, sizes, 0 if is_ernie else last)
    width = decoder.hidden_size
    return layer + 2 * width * width + 3 * width


def _eagle3_parameters(head: Decoder, model_width: int) -> int:
    """Return the parameters of a head that reads three layers, without an embedding of its own."""
    width, heads, dim = head.hidden_size, head.num_heads, head.head_dim
    fused = 3 * model_width * width
    attention = (2 * (heads + 2 * head.num_kv_heads) + heads) * dim * width
    mlp = 3 * head.intermediate_size * width
    vocabulary: int = head.settings.get("draft_vocab_size") or head.vocab_size
    return fused + attention + mlp + (vocabulary + 4) * width
