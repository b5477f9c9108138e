"""Reads a decoder's sizes from config.json and the headers of its weights, without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigurationError
from core.hub import require_network
from core.options import Options
from core.sizing import LENGTH_NAMES, LayerShape

DTYPE_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
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
    is_counted: bool
    """True if num_parameters was read from the weights' headers. Otherwise it was computed from the
    config, assuming Llama's architecture."""

    @property
    def shapes(self) -> list[LayerShape]:
        return [LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)] * self.num_layers


def decoder_from_directory(directory: Path, options: Options) -> Decoder:
    """Read the decoder in a directory. The weights are optional.

    Raises ConfigurationError if there is no config.json or the architecture is not supported.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{directory} holds no model (config.json is missing)")
    files = sorted(directory.glob("*.safetensors"))
    counted = sum(map(_count_parameters, files)) if files else None
    return _decoder(str(directory), json.loads(path.read_text("utf-8")), counted, options)


def decoder_from_hub(model_id: str, options: Options) -> Decoder:
    """Read a decoder on the hub; of its weights, fetch only the headers.

    Raises ConfigurationError if the model cannot be fetched or is not supported.
    """
    import huggingface_hub  # the import takes half a second
    from huggingface_hub.errors import NotASafetensorsRepoError

    revision, counted = options.revision, None
    try:
        require_network()  # or the library would try again for half a minute
        path = Path(
            huggingface_hub.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]
                model_id, "config.json", revision=revision
            )
        )
        with suppress(NotASafetensorsRepoError):
            metadata = huggingface_hub.get_safetensors_metadata(model_id, revision=revision)
            counted = sum(metadata.parameter_count.values())
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"{model_id}: cannot be read from the hub: {reason}") from error
    return _decoder(model_id, json.loads(path.read_text("utf-8")), counted, options)


def _count_parameters(path: Path) -> int:
    """Count the parameters in a safetensors file from the shapes in its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return sum(math.prod(entry["shape"]) for entry in header.values())


def _decoder(
    name: str, config: Mapping[str, Any], counted: int | None, options: Options
) -> Decoder:
    text = config.get("text_config") or config
    other_layers = set(text.get("layer_types") or ()) - _KNOWN_LAYERS
    if text.get("kv_lora_rank") or config.get("is_encoder_decoder") or other_layers:
        raise ConfigurationError(
            f"{name}: plan supports only decoders that cache K and V of all KV heads in every layer"
        )

    def size(key: str, *others: str) -> int:
        for name_in_config in (key, *others):
            if text.get(name_in_config):
                return int(text[name_in_config])
        raise ConfigurationError(f"{name}: config.json has no {key}, so plan cannot size it")

    num_heads, hidden_size = size("num_attention_heads", "n_head"), size("hidden_size", "n_embd")
    sizes = {
        "num_layers": size("num_hidden_layers", "n_layer"),
        "num_heads": num_heads,
        "num_kv_heads": int(text.get("num_key_value_heads") or num_heads),
        "head_dim": int(text.get("head_dim") or hidden_size // num_heads),
        "hidden_size": hidden_size,
        "intermediate_size": int(text.get("intermediate_size") or 4 * hidden_size),
        "vocab_size": size("vocab_size"),
    }
    return Decoder(
        name=name,
        **sizes,
        max_length=next((int(text[key]) for key in LENGTH_NAMES if text.get(key)), None),
        dtype=_dtype(text, options),
        num_parameters=counted or _llama_parameters(sizes, config),
        is_counted=counted is not None,
    )


def _dtype(config: Mapping[str, Any], options: Options) -> str:
    """Return the dtype that the engine would choose on CUDA."""
    if options.dtype != "auto":
        return options.dtype
    own = config.get("dtype") or config.get("torch_dtype")
    return "fp16" if own == "float16" else "bf16"


def _llama_parameters(sizes: Mapping[str, int], config: Mapping[str, Any]) -> int:
    """Compute the number of parameters: embeddings, attention without biases, gated MLPs, norms."""
    hidden, rows = sizes["hidden_size"], 2 * (sizes["num_heads"] + sizes["num_kv_heads"])
    layer = rows * sizes["head_dim"] * hidden + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    return embeddings * sizes["vocab_size"] * hidden + sizes["num_layers"] * layer + hidden
