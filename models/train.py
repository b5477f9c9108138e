"""Train the demo model: a small Llama that continues plays and answers chats in their style.

The corpus is a text file of speeches ("SPEAKER:", line break, text, blank line), such as
tinyshakespeare. The output directory is a Hugging Face checkpoint in bfloat16 with a tokenizer and
a chat template. At the end, the loss on the held-out end of the corpus and the speed are printed;
benchmarks.engine.accuracy measures the saved files. The same seed on the same machine gives the
same model.

With --draft-of, it is a draft model: a smaller one that learns the probabilities of another model,
for which it is to propose tokens (option.speculative_draft_model). It has the other's tokenizer, so
that its directory gets none.
"""

from __future__ import annotations

import argparse
import math
import time
from copy import deepcopy
from itertools import islice
from pathlib import Path

import torch
from corpus import (
    TrainingStream,
    encode,
    read_speeches,
    split,
    train_tokenizer,
    validation_documents,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WARM_UP = 0.05
EVALUATIONS = 20


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; the defaults reproduce the demo model in the repository."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="text file of speeches")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "demo",
        help="output directory (default: demo beside this script)",
    )

    parser.add_argument(
        "--draft-of", type=Path, metavar="DIR", help="train a draft model for the model in DIR"
    )

    def option(name: str, default: float, text: str) -> None:
        text += " (default: %(default)s)"
        parser.add_argument(name, type=type(default), default=default, metavar="N", help=text)

    option("--steps", 1700, "optimiser steps")
    option("--batch", 2, "windows per step")
    option("--context", 1024, "tokens per window and maximum positions of the model")
    option("--vocabulary", 1536, "tokens in the vocabulary")
    option("--layers", 4, "transformer layers")
    option("--width", 256, "size of the hidden state, a multiple of 128")
    option("--mlp-width", 768, "size of the MLP's hidden state")
    option("--learning-rate", 4e-3, "peak learning rate")
    option("--weight-decay", 0.1, "decay of the weight matrices")
    option("--dropout", 0.2, "dropout of the embedding and of every residual branch")
    option("--chat-share", 0.25, "share of the speeches rendered as conversations")
    option("--validation-share", 0.1, "share held out from the end of the corpus")
    option("--seed", 1, "seed of weights, dropout and data order")
    return parser.parse_args()


def build_model(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Build a Llama with a head size of 64 and two query heads per KV head.

    The tokenizer pads with the eos token, but the config sets no padding token, because Llama's
    embedding would not train the row of a padding token.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.width,
        intermediate_size=arguments.mlp_width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=arguments.width // 128,
        head_dim=64,
        max_position_embeddings=arguments.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Add dropout where activations enter the residual stream, in training mode only."""

    def drop(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, probability, module.training)

    layers = model.model.layers
    branches = [
        branch for layer in layers for branch in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ]
    for module in (model.model.embed_tokens, *branches):
        module.register_forward_hook(drop)


def build_optimizers(model: LlamaForCausalLM, weight_decay: float) -> list[Optimizer]:
    """Return Muon for the weight matrices (with updates of AdamW's size) and AdamW for the rest."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.model.parameters() if weight.ndim == 1]
    return [
        Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        AdamW([model.model.embed_tokens.weight, *norms], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(progress: float) -> float:
    """Return the learning rate factor: linear warm-up, then cosine decay, for progress 0 to 1."""
    return min(progress / WARM_UP, (1 + math.cos(math.pi * progress)) / 2)


def train(
    model: LlamaForCausalLM,
    stream: TrainingStream,
    validation: list[int],
    arguments: argparse.Namespace,
    teacher: LlamaForCausalLM | None,
) -> tuple[float, float]:
    """Train in place, and keep the weights of the best evaluation.

    teacher: as in `training_step`. Returns the loss in nats per token, and the tokens trained per
    second.
    """
    optimizers = build_optimizers(model, arguments.weight_decay)
    windows = stream.windows(arguments.context)
    losses: dict[str, float] = {}
    best, weights = math.inf, model.state_dict()
    seconds = 0.0
    with tqdm(range(1, arguments.steps + 1), unit="step") as steps:
        for step in steps:
            start = time.perf_counter()
            rate = arguments.learning_rate * schedule(step / arguments.steps)
            batch = torch.tensor(list(islice(windows, arguments.batch)))
            losses["loss"] = training_step(model, batch, optimizers, rate, teacher)
            seconds += time.perf_counter() - start
            if (arguments.steps - step) % max(1, arguments.steps // EVALUATIONS) == 0:
                losses["validation"] = total_loss(model, validation) / (len(validation) - 1)
                if losses["validation"] < best:
                    best, weights = losses["validation"], deepcopy(model.state_dict())
            steps.set_postfix(losses)
    model.load_state_dict(weights)
    return best, arguments.steps * arguments.batch * arguments.context / seconds


@torch.inference_mode()
def total_loss(model: LlamaForCausalLM, tokens: list[int]) -> float:
    """Return the summed loss in nats of all tokens but the first, over windows of full context."""
    context = model.config.max_position_embeddings
    model.eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, context - 1):
        window = torch.tensor([tokens[start : start + context]])
        nats += model(input_ids=window, labels=window).loss.item() * (window.shape[1] - 1)
    model.train()
    return nats


def training_step(
    model: LlamaForCausalLM,
    batch: Tensor,
    optimizers: list[Optimizer],
    learning_rate: float,
    teacher: LlamaForCausalLM | None,
) -> float:
    """Update the weights once and return the loss in nats per token.

    teacher: whose probabilities to learn; None: the batch's tokens.
    """
    with torch.autocast("cpu", torch.bfloat16):
        if teacher is None:
            loss = model(input_ids=batch, labels=batch).loss
        else:
            with torch.no_grad():
                wanted = teacher(input_ids=batch).logits.float().softmax(-1)
            logits = model(input_ids=batch).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(0, 1))
    loss.backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16, without the tokenizer."""
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.to(torch.bfloat16).save_pretrained(directory)


def main() -> None:
    """Train and save the model."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    speeches, held_out = split(read_speeches(arguments.corpus), arguments.validation_share)
    teacher = None
    if arguments.draft_of is None:
        tokenizer = train_tokenizer(speeches, arguments.vocabulary, arguments.context)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.draft_of)
        teacher = LlamaForCausalLM.from_pretrained(arguments.draft_of).eval()
    model = build_model(arguments, tokenizer)
    add_dropout(model, arguments.dropout)
    stream = TrainingStream(speeches, tokenizer, arguments.chat_share, arguments.seed)
    validation = validation_documents(held_out)
    loss, speed = train(model, stream, encode(tokenizer, validation), arguments, teacher)
    save(model, tokenizer, arguments.out)
    if teacher is None:
        tokenizer.save_pretrained(arguments.out)
    print(f"validation loss {loss:.4f} nats per token; {speed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
