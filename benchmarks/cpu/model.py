"""Writes a model with random weights as a directory in Hugging Face format."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from string import ascii_lowercase

import gguf
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cpu.shapes import SHAPES

SEED = 0


def write_model(shape: str, folder: Path) -> None:
    """Write config, weights and tokenizer, deterministically.

    Weights are in bf16, like those of most published models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1) + "\n")
    config = AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    write_tokenizer(SHAPES[shape]["vocab_size"], folder)


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    make_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n"
    )


def bytes_per_token(folder: Path, precision: str) -> int:
    """Return the bytes of weights, without scales, that our server reads for a token of one user.

    Those are of all matrices but the embedding, of which a token reads one row. precision: fp32,
    bf16, int8 or int4.
    """
    bits = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}[precision]
    bits_of_head = max(bits, 8)  # docs/quantization.md
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    embedding = next(shapes.pop(name) for name in list(shapes) if "embed_tokens" in name)
    head = shapes.pop("lm_head.weight", embedding)  # or tied
    others = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    return (others * bits + math.prod(head) * bits_of_head) // 8


def bytes_per_token_of_file(file: Path) -> int:
    """Return the same of a quantized GGUF file, whose codes our server keeps with 4 or 8 bits."""
    matrices = {one.name: one for one in gguf.GGUFReader(file).tensors if len(one.shape) > 1}
    embedding = matrices.pop("token_embd.weight")
    matrices.setdefault("output.weight", embedding)  # tied
    bits = (
        one.n_elements * (4 if one.tensor_type.name.startswith("Q4_") else 8)
        for one in matrices.values()
    )
    return int(sum(bits)) // 8


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer whose tokens are all bytes and short beginnings of words.

    Every token id decodes to a distinct text, and no training corpus is needed.
    """
    vocab = {byte: id for id, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    space = "Ġ"  # a space in byte-level BPE
    merges: list[tuple[str, str]] = []
    stems = deque([space])
    while len(vocab) < vocab_size:
        stem = stems.popleft()
        for letter in ascii_lowercase[: vocab_size - len(vocab)]:
            merges.append((stem, letter))
            vocab[stem + letter] = len(vocab)
            stems.append(stem + letter)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
