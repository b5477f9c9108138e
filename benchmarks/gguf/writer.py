"""Writes a model of a directory as a GGUF file, by the rules of llama.cpp's converter.

Usage: `python -m benchmarks.gguf.writer MODEL TYPE FILE`. TYPE, the type of the matrices, is F32,
F16, BF16, Q8_0, Q5_0, Q4_0 or MXFP4. With Q4_0, head and embedding have Q8_0, since our head never
has 4 bits.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from safetensors import safe_open

from benchmarks.gguf import states

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType]]
"""Returns a tensor's rows of bytes [..., bytes], or of floats, and their type, given its published
name and its values in fp32 with the inputs last. Those of merged experts are [experts, out, in]."""
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "granite": "granite",
    "mixtral": "llama", "qwen3_moe": "qwen3moe", "granitemoe": "granitemoe", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""llama.cpp's architectures by transformers' model types."""
WRITTEN = ARCHITECTURES | states.ARCHITECTURES
ROTATES_PAIRS = ("llama", "granite", "granitemoe")
NUMBERS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "num_experts": "expert_count",
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
FACTORS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "attention_multiplier": "attention.scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def write_gguf(
    model: Path, file: Path, encode: Encode, add_tokenizer: Callable[[gguf.GGUFWriter], None]
) -> None:
    """Write a model in safetensors. Exits if its architecture is not in WRITTEN."""
    config = states.complete(json.loads((model / "config.json").read_text()))
    if config["model_type"] not in WRITTEN:
        kinds = ", ".join(WRITTEN)
        raise SystemExit(f"{model}: {config['model_type']} cannot be written as GGUF, only {kinds}")
    architecture = WRITTEN[config["model_type"]]
    folder = Path(tempfile.mkdtemp(dir=file.parent))
    writer = gguf.GGUFWriter(folder / file.name, architecture)
    _add_settings(writer, architecture, config)
    add_tokenizer(writer)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for published, data, type in _in_one_piece(_encoded(model, encode, config), config):
        for part, rows in _parts(published, data):
            name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            name = "output.weight" if part == "lm_head.weight" else name
            assert name is not None, f"{architecture} has no {part}"
            writer.add_tensor(name, np.ascontiguousarray(rows), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for part in folder.iterdir():
        part.replace(file.with_name(part.name))
    folder.rmdir()


def add_tokenizer_of(model: Path, writer: gguf.GGUFWriter) -> None:
    """Add the byte-level tokenizer of a model with GPT-2's rules for splitting text."""
    content = json.loads((model / "tokenizer.json").read_text())
    bpe = content["model"]
    ids = bpe["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(
        [kinds.CONTROL if id in special else kinds.NORMAL for id in sorted(ids.values())]
    )
    merges = bpe["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    template = model / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def quantized_to(type_name: str) -> Encode:
    """Return the function that quantizes matrices. Head and embedding have at least 8 bits."""
    wanted = GGMLQuantizationType[type_name]

    def encode(name: str, weight: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        type = GGMLQuantizationType.F32 if is_kept(name, weight) else wanted
        if type == GGMLQuantizationType.Q4_0 and ("embed_tokens" in name or "lm_head" in name):
            type = GGMLQuantizationType.Q8_0
        return quants.quantize(weight, type), type

    return encode


def is_kept(name: str, weight: np.ndarray) -> bool:
    """Whether the converter keeps a tensor in fp32: norms, biases, routers, convolutions."""
    names = ("_bias", "router.weight", "router.layer.weight", *states.CONVOLUTIONS)
    return weight.ndim == 1 or name.endswith(names)


def is_transposed(name: str) -> bool:
    """Whether a model has a tensor with the outputs last: gpt-oss's experts, [experts, in, out]."""
    return re.search(r"experts\.\w+_proj$", name) is not None


def _add_settings(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    for setting, key in (NUMBERS | states.NUMBERS).items():
        if setting in config:
            if isinstance(config[setting], list):
                writer.add_array(f"{architecture}.{key}", config[setting])
            else:
                writer.add_uint32(f"{architecture}.{key}", config[setting])
    for setting, key in FACTORS.items():
        if config.get(setting) is not None:
            writer.add_float32(f"{architecture}.{key}", config[setting])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    ropes = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window") and architecture != "llama":
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if architecture == "gemma3":
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        writer.add_float32("gemma3.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])


def _encoded(
    model: Path, encode: Encode, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray, GGMLQuantizationType]]:
    """Yield the names, data and types of all tensors, in the order of the files."""
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                tensor = stored.get_tensor(name).float()
                if is_transposed(name):
                    tensor = tensor.transpose(1, 2).contiguous()
                yield name, *encode(name, states.as_stored(name, tensor.numpy(), config))


def _in_one_piece(
    tensors: Iterator[tuple[str, np.ndarray, GGMLQuantizationType]], config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray, GGMLQuantizationType]]:
    """Stack experts that are stored one by one, and bring all rows into llama.cpp's order."""
    architecture = WRITTEN[config["model_type"]]
    count = config.get("num_experts", config.get("num_local_experts", 0))
    waiting: dict[str, dict[int, np.ndarray]] = {}
    for name, data, type in tensors:
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is None:
            yield name, _as_stored(architecture, name, data, config), type
            continue
        merged = name.replace(expert[0], ".experts.")
        experts = waiting.setdefault(merged, {})
        experts[int(expert[1])] = data
        if len(experts) == count:
            yield merged, np.stack([experts[index] for index in range(count)]), type


def _as_stored(
    architecture: str, name: str, data: np.ndarray, config: dict[str, Any]
) -> np.ndarray:
    """Bring the rows of q and k into llama.cpp's order, where halves of a head that rotate together
    alternate, and add Gemma's 1 to norms."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = [config[key] for part, key in heads.items() if part in name]
    if found and architecture in ROTATES_PAIRS:
        halves = data.reshape(found[0], 2, -1, *data.shape[1:])
        return halves.swapaxes(1, 2).reshape(data.shape)
    has_offset = architecture.startswith("gemma") and name.endswith("norm.weight")
    return data + np.float32(1) if has_offset else data


def _parts(name: str, data: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Split gates from ups of merged experts, and yield names that the package gguf knows."""
    if "gate_up_proj" in name and ".experts." in name:  # gpt-oss: they alternate
        split = (("gate", data[:, ::2]), ("up", data[:, 1::2]))
        for part, rows in split:
            own = name.replace("gate_up_proj", f"{part}_proj").replace("_proj_bias", "_proj.bias")
            yield own if own.endswith(".bias") else f"{own}.weight", rows
    elif "input_linear" in name:  # Granite's: gates first
        for part, rows in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
            yield re.sub(r"block_sparse_moe.*", f"mlp.experts.{part}_proj.weight", name), rows
    elif name.endswith(".dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), data
    elif name.endswith(".sinks"):
        yield f"{name}.weight", data
    elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
        own = name.removesuffix("_bias")
        yield f"{own}.{'bias' if own != name else 'weight'}", data
    else:
        yield name, data


def main(model_dir: str, type_name: str, file: str) -> None:
    model = Path(model_dir)
    write_gguf(
        model, Path(file), quantized_to(type_name), lambda writer: add_tokenizer_of(model, writer)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
