"""What config.json and the headers of the weights say of a decoder's size, without torch."""

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
from core.options import Options
from core.sizing import LENGTH_NAMES, LayerShape

DTYPE_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a decoder."""

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
    """From the weights' own headers; else computed for a decoder as Llama's is."""

    @property
    def shapes(self) -> list[LayerShape]:
        return [LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)] * self.num_layers


def decoder_in(directory: Path, options: Options) -> Decoder:
    """The one whose files lie there; config.json is enough.

    Raises ConfigurationError where there is none, or one that is sized otherwise.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{directory} holds no model (config.json is missing)")
    files = sorted(directory.glob("*.safetensors"))
    counted = sum(map(_count, files)) if files else None
    return _decoder(str(directory), json.loads(path.read_text("utf-8")), counted, options)


def decoder_on_hub(model_id: str, options: Options) -> Decoder:
    """The one of an id, of whose weights only the headers are fetched; raises likewise."""
    import huggingface_hub  # half a second that only this needs
    from huggingface_hub.errors import NotASafetensorsRepoError

    revision, counted = options.revision, None
    try:
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
        raise ConfigurationError(f"{model_id}: not to be had from the hub: {reason}") from error
    return _decoder(model_id, json.loads(path.read_text("utf-8")), counted, options)


def _count(path: Path) -> int:
    """Numbers in a file of safetensors, which begins with the shapes of all."""
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
            f"{name}: plan sizes decoders that keep K and V of all their heads in every layer"
        )

    def size(key: str, *others: str) -> int:
        for each in (key, *others):
            if text.get(each):
                return int(text[each])
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
    """As the engine chooses it on CUDA."""
    if options.dtype != "auto":
        return options.dtype
    own = config.get("dtype") or config.get("torch_dtype")
    return "fp16" if own == "float16" else "bf16"


def _llama_parameters(sizes: Mapping[str, int], config: Mapping[str, Any]) -> int:
    """Embedding, gated MLPs, attention without biases, norms."""
    hidden, rows = sizes["hidden_size"], 2 * (sizes["num_heads"] + sizes["num_kv_heads"])
    layer = rows * sizes["head_dim"] * hidden + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    return embeddings * sizes["vocab_size"] * hidden + sizes["num_layers"] * layer + hidden
