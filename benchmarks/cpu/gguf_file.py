"""Writes a Llama model of a directory as a GGUF file, for llama.cpp.

Usage: `PEER_PYTHON -m benchmarks.cpu.gguf_file MODEL TYPE FILE`. PEER_PYTHON is the interpreter of
an environment with gguf and without this project's dependencies. TYPE, the type of the matrices, is
F32, BF16, Q8_0 or Q4_0. With Q4_0, head and embedding have Q8_0, since our head never has 4 bits.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # pyright: ignore[reportMissingImports]
import numpy as np

Q8_0, Q4_0, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "F32"))


def main(model_dir: str, type_name: str, file: str) -> None:
    model, partial = Path(model_dir), f"{file}.partial"
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"{model}: only a Llama can be written as GGUF; choose another --shape")
    writer = gguf.GGUFWriter(partial, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text())["model"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for published, stored in _tensors(model / "model.safetensors"):
        name = names.get_name(published, try_suffixes=(".weight",))
        assert name is not None, f"a Llama has no {published}"
        kind = _type(name, stored, gguf.GGMLQuantizationType[type_name])
        weight = gguf.quants.quantize(_as_rotated(published, stored, config), kind)
        writer.add_tensor(name, weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, file)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, bpe: dict[str, Any]) -> None:
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and values, in fp32, of a safetensors file in bf16."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        halves = np.frombuffer(content[start + begin : start + end], np.uint16)
        yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def _type(
    name: str, stored: np.ndarray, chosen: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    if stored.ndim == 1:
        return F32
    return Q8_0 if chosen == Q4_0 and not name.startswith("blk.") else chosen


def _as_rotated(published: str, stored: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return q or k in llama.cpp's order of a head's outputs: the halves that are rotated together
    alternate. Other weights stay as they are.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = [config[key] for part, key in heads.items() if part in published]
    if not found:
        return stored
    halves = stored.reshape(found[0], 2, -1, stored.shape[1])
    return halves.swapaxes(1, 2).reshape(stored.shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
