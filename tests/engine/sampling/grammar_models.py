"""A tiny model with a byte tokenizer, and requests whose answers follow a grammar."""

from __future__ import annotations

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from engine import SamplingParams, StructuredOutputsParams

EOS = 256
VOCABULARY = 300
"""The model's vocabulary size. Its tokenizer has fewer tokens: 256 bytes, EOS and one word."""
SMALL = {"dtype": "fp32", "block_size": 8, "max_rolling_batch_prefill_tokens": 24}
PROMPTS = [list(range(60, 60 + length)) for length in (3, 17, 9)]


def byte_tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<word>"])
    # Settings for training, which serving must ignore.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(direction="left", length=12, pad_id=5)
    return tokenizer


def save(path):
    """Save a random model with a tokenizer of bytes. Returns its folder, `path`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=EOS, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "norm" not in name:
                weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def form(**form):
    return {"structured_outputs": StructuredOutputsParams(**form)}


def answers(llm, params):
    prompts = [PROMPTS[number % 3] for number in range(len(params))]
    return [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]


def answer(llm, **params):
    return answers(llm, [SamplingParams(**{"seed": 1, "max_tokens": 20} | params)])[0]
