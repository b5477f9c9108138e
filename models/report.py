"""Measure the saved demo model and sample from it."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import END, encode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

PROMPT = "ROMEO:"
TEMPERATURE = 0.8
MESSAGES = [{"role": "user", "content": "Good morrow, cousin. What news from the king?"}]


@torch.inference_mode()
def total_loss(model: LlamaForCausalLM, tokens: list[int]) -> float:
    """Return the summed loss in nats of all tokens but the first, over windows of full context."""
    context = model.config.max_position_embeddings
    was_training = model.training
    model.eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, context - 1):
        window = torch.tensor([tokens[start : start + context]])
        nats += model(input_ids=window, labels=window).loss.item() * (window.shape[1] - 1)
    model.train(was_training)
    return nats


def measure(directory: Path, documents: list[str], tokens_per_second: float) -> str:
    """Measure the saved model on the held-out documents; return rows of the model card's table."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = encode(AutoTokenizer.from_pretrained(directory), documents)
    nats = total_loss(model, tokens)
    num_bytes = sum(len(text.removesuffix(END).encode()) for text in documents)
    size = sum(file.stat().st_size for file in directory.iterdir() if file.name != "README.md")
    return (
        f"| parameters | {model.num_parameters():,} |\n"
        f"| size on disk | {size / 1e6:.2f} MB |\n"
        f"| validation loss | {nats / (len(tokens) - 1):.4f} nats per token, "
        f"{nats / num_bytes:.4f} nats per byte |\n"
        f"| training speed | {tokens_per_second:,.0f} tokens/s |"
    )


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Return a prompt and its continuation of up to 160 tokens."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=160, do_sample=True, temperature=TEMPERATURE)
    return tokenizer.decode(output[0])


def samples(directory: Path, seed: int) -> dict[str, str]:
    """Return sample continuations of a play and of a chat, by title."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    set_seed(seed)
    return {
        f"{form}, temperature {TEMPERATURE}": sample(model, tokenizer, prompt)
        for form, prompt in (("Play", PROMPT), ("Chat", chat))
    }
