"""Tiny GGUF files, and models with their dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gguf.writer import is_kept, is_transposed, write_gguf


def write(source: Path, file: Path, kind: str = "F32") -> Path:
    """Write a model as a GGUF file, and its dequantized weights as an ordinary model beside it.

    kind: ggml's type of matrices whose rows its blocks divide; others are F16. As gguf cannot
    quantize to K-quants, those are random blocks. Returns the directory of the ordinary model.
    """
    dequantized = {}

    def encode(name: str, weight: Any) -> tuple[Any, GGMLQuantizationType]:
        type = _type(name, weight, kind)
        if type.name == kind and kind.endswith("_K"):
            data = random_blocks(weight.shape, type)
        else:
            data = quants.quantize(weight, type)
        exact = torch.from_numpy(quants.dequantize(data, type)).view(weight.shape)
        dequantized[name] = exact.transpose(1, 2).contiguous() if is_transposed(name) else exact
        return data, type

    size = json.loads((source / "config.json").read_text())["vocab_size"]
    write_gguf(source, file, encode, lambda writer: _add_tokenizer(writer, size))
    folder = file.with_suffix("")
    shutil.copytree(source, folder)
    save_file(dequantized, folder / "model.safetensors", {"format": "pt"})
    return folder


def _add_tokenizer(writer: Any, size: int) -> None:
    """Add a byte-level tokenizer with two merges. The first token ends an answer."""
    letters = [chr(ord("a") + index) for index in range(26)]
    tokens = ["<|endoftext|>", "<|user|>", *letters, "Ġ", "he", "Ġhe"]
    tokens += [f"[unused{index}]" for index in range(size - len(tokens))]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (size - 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")


def _type(name: str, weight: Any, kind: str) -> GGMLQuantizationType:
    if is_kept(name, weight):
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[kind]
    fits = weight.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if fits else GGMLQuantizationType.F16


def random_blocks(shape: tuple[int, ...], type: GGMLQuantizationType) -> Any:
    """Return random blocks whose scales are those of weights."""
    elements, size = gguf.GGML_QUANT_SIZES[type]
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = (*shape[:-1], shape[-1] // elements, size)
    data = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
    starts = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}
    scale: Tensor = torch.tensor([0.0005], dtype=torch.float16).view(torch.uint8)
    for start in starts[type.name]:
        data[..., start : start + 2] = scale
    return data.flatten(-2).numpy()
