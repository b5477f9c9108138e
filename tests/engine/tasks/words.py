"""A tokenizer of a few words, and the sizes of the models that use it."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat",
         "and", "dog", "ran", "who", "where", "is", "it"]  # fmt: skip
MAX_LENGTH = 32
BERT = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 2, "intermediate_size": 32,
         "max_position_embeddings": MAX_LENGTH, "pad_token_id": 0}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer that puts texts between [CLS] and [SEP]."""
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
