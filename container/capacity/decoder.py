"""Reads a decoder's sizes from config.json and the headers of its weights, without torch."""

from __future__ import annotations

import json
import math
import re
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
from core.configuration.hub import require_network
from core.configuration.kv_layout import LayerShape
from core.configuration.options import Options
from core.configuration.sizing import LENGTH_NAMES
from core.errors import ConfigurationError
from core.files.gguf import GGUF_INDEX
from core.states.layout import KINDS, OF_STATES_ALONE, LayerState, slot_bytes, sum_bytes

DTYPE_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
BYTES_PER_WEIGHT = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 5 / 128}
"""Bytes by the value of option.quantize. int4 has a scale of 4 bytes and a zero point of 1 byte for
each group of 128 weights. fp8 and int8 store such values only per output row, which adds next to
nothing."""
GGUF_BYTES = {"Q8_0": 1 + 5 / 32, "Q5_0": 1 + 5 / 32, "Q4_0": 0.5 + 5 / 32}
"""Bytes of a weight that is served as a GGUF file has it, by ggml's type."""
INT8_HEADS = {"int8", "int4"}
"""Values of option.quantize that store the head in int8."""
_LATER = re.compile(r"(?:language_model\.|model\.)*(?:mtp\w*\.|layers\.(\d+)\.)")
"""The name of a tensor of multi-token prediction, if its layer comes after the model's."""
_SHARED = (".embed_tokens.", ".shared_head.head.")
"""The model's own tensors, which a layer of multi-token prediction has again, and nobody reads."""
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model or a head, which lies whole beside the first rank's part of the model."""

    what: str
    name: str
    weights_bytes: int
    shapes: tuple[LayerShape, ...]
    """What its layers keep of a token."""
    state_bytes: int = 0
    """Bytes of the hidden state that the model keeps of each token for a head."""
    row_bytes: int = 0
    """Bytes of the states that its own layers keep of a sequence."""


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
    draft: Draft | None = None
    sum_bytes: int = 4
    """Of an element of their sums."""
    bytes_per_weight: float = 2.0
    """Of a linear layer's weight, as it is loaded."""
    mtp_bytes: int = 0
    """Bytes of the layer of multi-token prediction, if the weights' headers tell. They are not in
    `weights_bytes`."""

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

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that `num_layer_parameters` takes."""
        return {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
        }


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor, from the header of its file."""

    name: str
    num_elements: int
    """An element into which several weights are packed counts once."""
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
            counted = [
                _tensor(name, tensor.shape, tensor.data_offsets)
                for file in files
                for name, tensor in file.tensors.items()
            ]
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"{model_id}: cannot be read from the hub: {reason}") from error
    return _decoder(model_id, json.loads(path.read_text("utf-8")), counted, options)


def _read_headers(paths: Sequence[Path]) -> list[_Tensor]:
    """Return the tensors of safetensors files from their headers."""
    tensors: list[_Tensor] = []
    for path in paths:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors += [_tensor(name, e["shape"], e["data_offsets"]) for name, e in header.items()]
    return tensors


def _read_index(index: Path, config: Mapping[str, Any], options: Options) -> list[_Tensor]:
    """Return the tensors of a GGUF file, with the bytes that they take once loaded."""
    dense_bytes = DTYPE_BYTES[_dtype(config, options)]
    tensors: list[_Tensor] = []
    for tensor in json.loads(index.read_text()):
        size = math.prod(tensor["shape"])
        kind = tensor["type"] if tensor.get("is_packed") else ""
        num_bytes = int(size * GGUF_BYTES.get(kind, dense_bytes))
        tensors.append(_Tensor(tensor["name"], size, num_bytes))
    return tensors


def _tensor(name: str, shape: Sequence[int], offsets: Sequence[int]) -> _Tensor:
    """offsets: begin and end in the file."""
    begin, end = offsets
    return _Tensor(name, math.prod(shape), end - begin)


def _parted(tensors: Iterable[_Tensor], num_layers: int) -> tuple[list[_Tensor], list[_Tensor]]:
    """Return the model's tensors, and those of the first layer of multi-token prediction."""
    model: list[_Tensor] = []
    mtp: list[_Tensor] = []
    for tensor in tensors:
        later = _LATER.match(tensor.name)
        index = num_layers if later is None or later[1] is None else int(later[1])
        if later is None or index < num_layers:
            model.append(tensor)
        elif index == num_layers and not any(name in tensor.name for name in _SHARED):
            mtp.append(tensor)
    return model, mtp


def _decoder(
    name: str, config: Mapping[str, Any], tensors: Sequence[_Tensor] | None, options: Options
) -> Decoder:
    """tensors: of the weights' headers; None if these were not read."""
    text = text_settings(config)
    _check_supported(name, text)

    def size(key: str, *others: str, default: int = 0) -> int:
        for name_in_config in (key, *others):
            if text.get(name_in_config):
                return int(text[name_in_config])
        if default:
            return default
        raise ConfigurationError(f"{name}: config.json has no {key}, which plan needs")

    hidden_size = size("hidden_size", "n_embd")
    # Mamba's states have heads that are one channel wide.
    narrowest = hidden_size if text.get("model_type") in OF_STATES_ALONE else 0
    num_heads = size("num_attention_heads", "n_head", "num_heads", default=narrowest)
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
    counted, of_mtp = _parted(tensors or (), sizes["num_layers"])
    if quantization is not None:
        weights_format = str(quantization.get("quant_method", "quantized"))
        precision = _bits(quantization)
        weights_bytes = _quantized_bytes(num_parameters, sizes, text, dtype, precision)
        if tensors is not None:
            weights_bytes = sum(tensor.num_bytes for tensor in counted)
        mtp_bytes = sum(tensor.num_bytes for tensor in of_mtp)
    else:
        if tensors is not None:
            num_parameters = sum(tensor.num_elements for tensor in counted)
        precision = (
            options.execution.quantize if options.execution.quantize in BYTES_PER_WEIGHT else None
        )
        mtp_elements = sum(tensor.num_elements for tensor in of_mtp)
        mtp_bytes = int(mtp_elements * _bytes_per_weight(dtype, precision))
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
        is_counted=tensors is not None,
        shapes=shapes,
        unfreed_shapes=unfreed_shapes(text, shapes),
        settings=text,
        activations=(mixed_activations if keeps_states else activations)(text, sizes),
        linears=mixed_linears(text, sizes) if keeps_states else linears(text, sizes, shapes),
        states=states(text),
        draft=None,
        sum_bytes=sum_bytes(options.memory.state_dtype, str(text.get("model_type"))),
        bytes_per_weight=_bytes_per_weight(dtype, precision),
        mtp_bytes=mtp_bytes,
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
    kept = _embedding_parameters(sizes, config)
    others = int((num_parameters - kept) * _bytes_per_weight(dtype, precision))
    return kept * DTYPE_BYTES[dtype] + others


def _bytes_per_weight(dtype: str, precision: str | None) -> float:
    return DTYPE_BYTES[dtype] if precision is None else BYTES_PER_WEIGHT[precision]


def _bits(quantization: Mapping[str, Any]) -> str:
    """Return the key of BYTES_PER_WEIGHT for a quantized checkpoint, from its config alone."""
    groups: Mapping[str, Any] = quantization.get("config_groups") or {}
    bits: int | None = quantization.get("bits") or quantization.get("w_bit")
    for group in groups.values():
        bits = group["weights"]["num_bits"]
    is_int4 = bits == 4 or quantization.get("quant_method") in ("awq", "mxfp4")
    return "int4" if is_int4 else "int8"
