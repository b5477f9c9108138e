"""Encoders of published shapes with random weights, and the texts that they embed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

SEED = 0
MAX_TOKENS = 512
VOCABULARY = 30522
POOLING_FILE = Path("1_Pooling") / "config.json"
SHAPES = {  # hidden size, layers, heads, pooling
    "bge-small": (384, 12, 12, "cls"),
    "bge-base": (768, 12, 12, "cls"),
    "e5-large": (1024, 24, 16, "mean"),
    "dry": (32, 1, 2, "cls"),
}
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_model(shape: str, folder: Path) -> None:
    """Write config, fp32 weights, tokenizer and sentence-transformers' files, deterministically."""
    width, num_layers, num_heads, pooling = SHAPES[shape]
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
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the only name that all versions know
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(steps)
    ]
    (folder / "2_Normalize").mkdir(exist_ok=True)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / POOLING_FILE).write_text(
        json.dumps(
            {
                "word_embedding_dimension": width,
                "pooling_mode_cls_token": pooling == "cls",
                "pooling_mode_mean_tokens": pooling == "mean",
            }
        )
    )
    (folder / "modules.json").write_text(json.dumps(modules))  # last: then all are there


def true_vectors(folder: Path, texts: Sequence[str]) -> Tensor:
    """Return transformers' vectors in fp32 [texts, hidden size], of unit length."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    is_cls = json.loads((folder / POOLING_FILE).read_text())["pooling_mode_cls_token"]
    rows: list[Tensor] = []
    with torch.inference_mode():
        for text in texts:  # one by one, so none is padded
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            rows.append(hidden[0] if is_cls else hidden.mean(0))
    return torch.nn.functional.normalize(torch.stack(rows))


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
