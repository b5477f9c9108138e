"""Two tiny tokenizers."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from core.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """Byte-level BPE as in Llama 3 and GPT-2: a character may span four tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["to be or not to be that is the question"] * 9, trainer)
    return saved(tokenizer, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory):
    """SentencePiece style as in Llama 2: the first token's leading space is dropped."""
    words = ["▁", "▁to", "▁be", "▁or", "▁not", "t", "o", "b", "e", "r", "n", "<unk>"]
    vocabulary = [(word, -float(rank)) for rank, word in enumerate(words)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=len(words) - 1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return saved(tokenizer, tmp_path_factory.mktemp("metaspace"))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory):
    """SentencePiece's BPE as in Llama 2: characters without a token are tokens of bytes."""
    words = ["<s>", "▁", "▁to", "▁be", "to", "be", "▁▁", "n", "!", ""]
    vocabulary = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({word: id for id, word in enumerate(vocabulary)}, [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<s>"])
    return saved(tokenizer, tmp_path_factory.mktemp("byte_fallback"))


def saved(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)
