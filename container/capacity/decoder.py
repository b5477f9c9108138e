"""Reads a decoder's sizes from config.json and the headers of its weights, without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container.capacity.architecture import (
    LATENT_TYPES,
    layer_shapes,
    num_layer_parameters,
    states,
    text_settings,
    unfreed_shapes,
)
from container.capacity.mixers import mixed_activations, mixed_linears, num_mixed_parameters
from container.capacity.widths import Width, activations, linears
from core.configuration.hub import GGUF_INDEX, require_network
from core.configuration.kv_layout import LayerShape
from core.configuration.options import Options
from core.configuration.sizing import LENGTH_NAMES
from core.errors import ConfigurationError
from core.states.layout import KINDS, LayerState, slot_bytes, sum_bytes

DTYPE_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
BYTES_PER_WEIGHT = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 5 / 128}
"""Bytes by the value of option.quantize. int4 has a scale of 4 bytes and a zero point of 1 byte for
each group of 128 weights. fp8 and int8 store such values only per output row, which adds next to
nothing."""
GGUF_BYTES = {"Q8_0": 1 + 5 / 32, "Q5_0": 1 + 5 / 32, "Q4_0": 0.5 + 5 / 32}
"""Bytes of a weight that is served as a GGUF file has it, by ggml's type."""
INT8_HEADS = {"int8", "int4"}
"""Values of option.quantize that store the head in int8."""
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a decoder-only model."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_length: int | None
    dtype: str
    num_parameters: int
    weights_bytes: int
    weights_format: str
    """How the weights are stored: the dtype, option.quantize, or the checkpoint's quant_method."""
    is_counted: bool
    """True if weights_bytes follows from the weights' headers. Otherwise it was computed from the
    config."""

    shapes: tuple[LayerShape, ...]
    """What each layer keeps of a token."""
    unfreed_shapes: tuple[LayerShape, ...]
    """The same, if each layer kept K and V of all heads and of all tokens."""
    settings: Mapping[str, Any]
    """Those of `text_settings`."""
    activations: tuple[Width, ...]
    """What a token takes in each part of a layer."""
    linears: Width
    """Inputs and outputs of all linear layers but those of routed experts, added up."""
    states: tuple[LayerState, ...] = ()
    """Of the layers that keep a state."""
    draft: Decoder | None = None
    """A draft model, which lies whole beside the first rank's part."""
    sum_bytes: int = 4
    """Of an element of their sums."""

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence keeps beside its K and V."""
        return slot_bytes(self.states, DTYPE_BYTES[self.dtype], self.sum_bytes)

    @property
    def activation_width(self) -> int:
        """Elements that a token takes in the widest part of a layer."""
        return max(width.share(1).whole for width in self.activations)

    @property
    def linear_width(self) -> int:
        """Inputs and outputs of all linear layers but those of routed experts, added up."""
        return self.linears.share(1).whole


@dataclass(frozen=True, slots=True)
class _Headers:
    """Totals over the headers of the weight files."""

    num_elements: int
    """Elements of the files. An element into which several weights are packed counts once."""
    num_bytes: int


def decoder_from_directory(directory: Path, options: Options) -> Decoder:
    """Read the sizes of the decoder in a directory, which need not hold the weights.

    Raises ConfigurationError if there is no config.json or the architecture is not supported.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{directory} holds no model (config.json is missing)")
    config, index = json.loads(path.read_text("utf-8")), directory / GGUF_INDEX
    if index.is_file():
        return _decoder(str(directory), config, _read_index(index, config, options), options)
    files = sorted(directory.glob("*.safetensors"))
    counted = _read_headers(files) if files else None
    return _decoder(str(directory), config, counted, options)


def decoder_from_hub(model_id: str, options: Options) -> Decoder:
    """Read the sizes of a decoder on the hub. Of its weights, only the headers are fetched.

    Raises ConfigurationError if the model cannot be fetched or is not supported.
    """
    import huggingface_hub  # the import takes half a second
    from huggingface_hub.errors import NotASafetensorsRepoError

    revision, counted = options.source.revision, None
    try:
        require_network()  # or the library would try again for half a minute
        path = Path(
            huggingface_hub.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]
                model_id, "config.json", revision=revision
            )
        )
        with suppress(NotASafetensorsRepoError):
            metadata = huggingface_hub.get_safetensors_metadata(model_id, revision=revision)
            files = metadata.files_metadata.values()
            tensors = [tensor for file in files for tensor in file.tensors.values()]
            counted = _count((tensor.shape, tensor.data_offsets) for tensor in tensors)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"{model_id}: cannot be read from the hub: {reason}") from error
    return _decoder(model_id, json.loads(path.read_text("utf-8")), counted, options)


def _read_headers(paths: Sequence[Path]) -> _Headers:
    """Count the elements and bytes of safetensors files from their headers."""
    tensors: list[tuple[list[int], list[int]]] = []
    for path in paths:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors += [(entry["shape"], entry["data_offsets"]) for entry in header.values()]
    return _count(tensors)


def _read_index(index: Path, config: Mapping[str, Any], options: Options) -> _Headers:
    """Count the elements of a GGUF file's tensors, and the bytes that they take once loaded."""
    dense_bytes = DTYPE_BYTES[_dtype(config, options)]
    sizes = [
        (math.prod(tensor["shape"]), tensor["type"] if tensor.get("is_packed") else "")
        for tensor in json.loads(index.read_text())
    ]
    num_bytes = sum(size * GGUF_BYTES.get(kind, dense_bytes) for size, kind in sizes)
    return _Headers(sum(size for size, _ in sizes), int(num_bytes))


def _count(tensors: Iterable[tuple[Sequence[int], Sequence[int]]]) -> _Headers:
    """Add up tensors by their shapes and their offsets [begin, end] in the files."""
    num_elements = num_bytes = 0
    for shape, (begin, end) in tensors:
        num_elements += math.prod(shape)
        num_bytes += end - begin
    return _Headers(num_elements, num_bytes)


def _decoder(
    name: str, config: Mapping[str, Any], counted: _Headers | None, options: Options
) -> Decoder:
    text = text_settings(config)
    _check_supported(name, text)

    def size(key: str, *others: str, default: int = 0) -> int:
        for name_in_config in (key, *others):
            if text.get(name_in_config):
                return int(text[name_in_config])
        if default:
            return default
        raise ConfigurationError(f"{name}: config.json has no {key}, which plan needs")

    num_heads, hidden_size = size("num_attention_heads", "n_head"), size("hidden_size", "n_embd")
    sizes = {
        "num_layers": size("num_hidden_layers", "n_layer"),
        "num_heads": num_heads,
        "num_kv_heads": int(text.get("num_key_value_heads") or num_heads),
        "head_dim": int(text.get("head_dim") or hidden_size // num_heads),
        "hidden_size": hidden_size,
        "intermediate_size": size("block_ff_dim", "intermediate_size", default=4 * hidden_size),
        "vocab_size": size("vocab_size"),
    }
    dtype = _dtype(text, options)
    num_parameters = _embedding_parameters(sizes, text) + sizes["hidden_size"]
    keeps_states = text.get("model_type") in KINDS
    count = num_mixed_parameters if keeps_states else num_layer_parameters
    num_parameters += count(text, sizes)
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if quantization is not None:
        weights_format = str(quantization.get("quant_method", "quantized"))
        weights_bytes = _quantized_bytes(num_parameters, sizes, text, dtype, _bits(quantization))
        if counted is not None:
            weights_bytes = counted.num_bytes
    else:
        num_parameters = num_parameters if counted is None else counted.num_elements
        precision = (
            options.execution.quantize if options.execution.quantize in BYTES_PER_WEIGHT else None
        )
        weights_format = precision or dtype
        weights_bytes = _quantized_bytes(num_parameters, sizes, text, dtype, precision)
        if precision in INT8_HEADS:
            head = sizes["vocab_size"] * sizes["hidden_size"]
            # A tied head is a copy in int8, beside the embedding in the model's dtype.
            is_tied = text.get("tie_word_embeddings")
            weights_bytes += head if is_tied else head - head * DTYPE_BYTES[dtype]
    text["num_hidden_layers"] = sizes["num_layers"]
    shapes = layer_shapes(text, sizes["num_kv_heads"], sizes["head_dim"])
    return Decoder(
        name=name,
        **sizes,
        max_length=next((int(text[key]) for key in LENGTH_NAMES if text.get(key)), None),
        dtype=dtype,
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        weights_format=weights_format,
        is_counted=counted is not None,
        shapes=shapes,
        unfreed_shapes=unfreed_shapes(text, shapes),
        settings=text,
        activations=(mixed_activations if keeps_states else activations)(text, sizes),
        linears=mixed_linears(text, sizes) if keeps_states else linears(text, sizes, shapes),
        states=states(text),
        draft=None,
        sum_bytes=sum_bytes(options.memory.state_dtype, str(text.get("model_type"))),
    )


def _check_supported(name: str, text: Mapping[str, Any]) -> None:
    keeps_states = text.get("model_type") in KINDS
    other_layers = not keeps_states and set(text.get("layer_types") or ()) - _KNOWN_LAYERS
    has_other_latents = text.get("kv_lora_rank") and text.get("model_type") not in LATENT_TYPES
    if other_layers or has_other_latents or text.get("is_encoder_decoder"):
        raise ConfigurationError(
            f"{name}: plan supports only decoders that cache K and V, or the latents of "
            f"{', '.join(sorted(LATENT_TYPES))}, in every layer"
        )


def _dtype(config: Mapping[str, Any], options: Options) -> str:
    """Return the dtype that the engine would choose on CUDA."""
    if options.execution.dtype != "auto":
        return options.execution.dtype
    dtype = config.get("dtype") or config.get("torch_dtype")
    return "fp16" if dtype == "float16" else "bf16"


def _embedding_parameters(sizes: Mapping[str, int], config: Mapping[str, Any]) -> int:
    """Return the number of parameters of the embedding and the head, which may be the same."""
    count = 1 if config.get("tie_word_embeddings") else 2
    return count * sizes["vocab_size"] * sizes["hidden_size"]


def _quantized_bytes(
    num_parameters: int,
    sizes: Mapping[str, int],
    config: Mapping[str, Any],
    dtype: str,
    precision: str | None,
) -> int:
    """Return the bytes of the weights if all but embeddings and head are quantized.

    precision: a key of BYTES_PER_WEIGHT, or None if nothing is quantized.
    """
    if precision is None:
        return num_parameters * DTYPE_BYTES[dtype]
    kept = _embedding_parameters(sizes, config)
    return kept * DTYPE_BYTES[dtype] + int((num_parameters - kept) * BYTES_PER_WEIGHT[precision])


def _bits(quantization: Mapping[str, Any]) -> str:
    """Return the key of BYTES_PER_WEIGHT for a quantized checkpoint, from its config alone."""
    groups: Mapping[str, Any] = quantization.get("config_groups") or {}
    bits: int | None = quantization.get("bits") or quantization.get("w_bit")
    for group in groups.values():
        bits = group["weights"]["num_bits"]
    is_int4 = bits == 4 or quantization.get("quant_method") in ("awq", "mxfp4")
    return "int4" if is_int4 else "int8"
