"""Encoders of published shapes with random weights, and the texts that they embed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SEED = 0
MAX_TOKENS = 512
VOCABULARY = 30522
SHAPES = {  # hidden size, layers, heads
    "bge-small": (384, 12, 12),
    "bge-base": (768, 12, 12),
    "bge-large": (1024, 24, 16),
}
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_model(shape: str, folder: Path) -> None:
    """Write config, fp32 weights, tokenizer and sentence-transformers' files, deterministically."""
    width, num_layers, num_heads = SHAPES[shape]
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=4 * width,
        max_position_embeddings=MAX_TOKENS,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        BertModel(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Normalize").mkdir(exist_ok=True)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": width, "pooling_mode_cls_token": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts(count: int) -> list[str]:
    """Return texts of 32 to 512 tokens, most of them short, with a mean of some 140."""
    chance = random.Random(SEED)
    lengths = [min(MAX_TOKENS, 32 + int(chance.expovariate(1 / 110))) for _ in range(count)]
    numbers = range(len(_SPECIAL), VOCABULARY)
    return [" ".join(f"w{chance.choice(numbers)}" for _ in range(n - 2)) for n in lengths]


def _tokenizer() -> PreTrainedTokenizerFast:
    words = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), VOCABULARY))]
    vocabulary = {word: id for id, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_TOKENS,
    )
