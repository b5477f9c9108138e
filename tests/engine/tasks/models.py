"""Tiny random models for tasks, each written to a folder with a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat",
         "and", "dog", "ran", "who", "where", "is", "it"]  # fmt: skip
MAX_LENGTH = 32
_BERT = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 2, "intermediate_size": 32,
         "max_position_embeddings": MAX_LENGTH, "pad_token_id": 0}  # fmt: skip
_NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
_MODELS = {
    "classifier": (AutoModelForSequenceClassification, "bert", _BERT | {"num_labels": 3}),
    "tagger": (AutoModelForTokenClassification, "bert", _BERT | {"num_labels": 3}),
    "reader": (AutoModelForQuestionAnswering, "bert", _BERT),
    "filler": (AutoModelForMaskedLM, "bert", _BERT),
    "entailer": (
        AutoModelForSequenceClassification,
        "bert",
        _BERT | {"id2label": _NLI, "label2id": {name: id for id, name in _NLI.items()}},
    ),
    "encoder": (AutoModel, "bert", _BERT),
    "roberta": (AutoModel, "roberta", _BERT | {"max_position_embeddings": 20}),
    "t5": (AutoModel, "t5", {"vocab_size": len(WORDS), "d_model": 16, "d_kv": 8, "d_ff": 32,
                             "num_layers": 2, "num_heads": 2, "pad_token_id": 0}),
    "llama": (AutoModel, "llama", _BERT | {"num_key_value_heads": 1}),
    "viewer": (
        AutoModelForImageClassification,
        "vit",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
}  # fmt: skip


def save_task_model(name: str, folder: Path) -> Path:
    """Writes the model unless it is there; weights are spread so that answers differ."""
    path = folder / name
    if path.exists():
        return path
    kind, architecture, settings = _MODELS[name]
    torch.manual_seed(3)
    model = kind.from_config(CONFIG_MAPPING[architecture](**settings), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    if architecture == "vit":
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(path)
    else:
        tokenizer().save_pretrained(path)
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; a text stands between [CLS] and [SEP]."""
    words = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_LENGTH,
    )
