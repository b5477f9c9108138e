"""Measure what option.quantize changes in the logits of every family of our decoder.

Each family gets a model of random weights, wide enough for groups of 128 inputs. The same tokens
run through it unquantized and in each precision. Random weights have no outliers, and their logits
have no clear winner. So the errors only show how families compare; they do not forecast
what a trained model loses. `python -m benchmarks.engine.accuracy` measures that.

    python -m benchmarks.engine.accuracy_by_family
    python -m benchmarks.engine.accuracy_by_family llama gpt_oss
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from core.plan import Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.attention.backends import make_backend
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.inputs import InputBuilder
from engine.loading.model_source import ModelSource
from engine.loading.own_decoder import load_own_decoder
from engine.model.families import FAMILIES
from engine.model.quantization.at_load import QUANTIZERS
from engine.phases import Phases
from engine.staging import Staging

CPU = torch.device("cpu")
LENGTH = 512
"""Tokens to run. The logits of all their positions are compared."""
BLOCK_SIZE = 16
SIZES: Mapping[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
OWN_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # The default, 1, would be eight times the usual scale of attention's scores.
    "granite": {"attention_multiplier": 0.125},
    "granitemoe": {"attention_multiplier": 0.125},
    "gpt2": {"n_inner": 512},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 256},
}
"""Settings of these families alone, which replace or extend the common config."""


@dataclass(frozen=True, slots=True)
class Change:
    """How far logits are from the unquantized ones."""

    error: float
    """Norm of the difference, relative to that of the unquantized logits. A constant added to all
    logits of a position does not count, because the softmax ignores it."""
    same_best: float
    """Share of positions whose likeliest token is the same."""

    @classmethod
    def between(cls, logits: Tensor, unquantized: Tensor) -> Change:
        """Compare logits [T, vocabulary]."""
        rounded, exact = (rows - rows.mean(1, keepdim=True) for rows in (logits, unquantized))
        same = rounded.argmax(1) == exact.argmax(1)
        return cls(float((rounded - exact).norm() / exact.norm()), float(same.float().mean()))


def family_config(family: str) -> PreTrainedConfig:
    """Return a small config with the family's default features."""
    has_experts = FAMILIES[family].experts is not None
    settings = {**SIZES, **(EXPERTS if has_experts else {}), **OWN_SETTINGS.get(family, {})}
    return CONFIG_MAPPING[family](**settings)


def save_random_model(family: str, config: PreTrainedConfig, folder: Path) -> None:
    """Write a model whose matrices and norms neither shrink nor amplify their inputs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif name.endswith("norm.weight"):
                # Nemotron's norms multiply by 1 + weight, and transformers sets the weights to 1.
                weight.fill_(1 - FAMILIES[family].norm.offset)
    model.save_pretrained(folder)


@torch.inference_mode()
def all_logits(folder: Path, config: PreTrainedConfig, precision: str | None) -> Tensor:
    """Return the logits [LENGTH, vocabulary] of random tokens, computed in fp32.

    Raises UnsupportedModelError if our decoder's first layers differ from transformers' layers with
    the same rounded weights.
    """
    source = ModelSource(
        model_dir=folder, config=config, dtype=torch.float32, device=CPU, precision=precision
    )
    decoder = load_own_decoder(source, LENGTH, Phases())
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    cache = KVCache(decoder.shapes, num_blocks, BLOCK_SIZE, torch.float32, CPU)
    backend, _ = make_backend(CPU, decoder.shapes, BLOCK_SIZE, LENGTH, torch.float32)
    ids = torch.randint(config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    sequence = Sequence(0, ids.tolist(), SamplingParams())
    chunk = Chunk(sequence, 0, LENGTH, tuple(range(num_blocks)), True)
    inputs = InputBuilder(BLOCK_SIZE, Staging(CPU)).build(StepPlan((chunk,)))
    step = PagedStep(inputs.batch, cache, backend)
    return decoder(inputs.token_ids, inputs.positions, torch.arange(LENGTH), step)


def measure(family: str) -> dict[str, Change]:
    """Return the change by precision."""
    config = family_config(family)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model(family, config, folder)
        unquantized = all_logits(folder, config, None)
        return {
            precision: Change.between(all_logits(folder, config, precision), unquantized)
            for precision in QUANTIZERS
        }


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    columns = [f"{name}: {what}" for name in QUANTIZERS for what in ("error", "same best")]
    print(f"| family | {' | '.join(columns)} |")
    print("| --- |" + " ---: |" * len(columns))
    for family in options.families or FAMILIES:
        changes = measure(family).values()
        cells = [f"{change.error:.1%} | {change.same_best:.0%}" for change in changes]
        print(f"| {family} | {' | '.join(cells)} |", flush=True)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure errors of logits for each precision.")
    parser.add_argument(
        "families", nargs="*", help=f"families to measure (default: all of {', '.join(FAMILIES)})"
    )
    options = parser.parse_args(arguments)
    for family in options.families:
        if family not in FAMILIES:
            parser.error(f"{family} is not one of the families {', '.join(FAMILIES)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
