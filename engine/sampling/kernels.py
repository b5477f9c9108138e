"""Selects the sampler's kernels: Triton on CUDA, C++ and torch on a CPU.

Without a compiler for C++, torch runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling import draw
from engine.sampling.draw import Draw
from engine.sampling.rows import Row
from engine.staging import Upload
from kernels.cpu import logits as cpu_logits
from kernels.cpu.shared_library import unavailable_reason
from kernels.sampling import torch_logits

BestTokens = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Has the contract of `kernels.sampling.torch_logits.best_tokens`."""


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The sampler's kernels. Every choice of kernels gives the same tokens."""

    best_tokens: BestTokens
    plan_draws: Callable[[Sequence[Row], int, Upload], list[Draw]]
    """Has the contract of `engine.sampling.draw.plan_draws`."""


def make_sampling_kernels(device: torch.device) -> SamplingKernels:
    if device.type == "cuda":
        # Imported only here, so that CPUs do not need Triton.
        from engine.sampling import triton_draw
        from kernels.sampling import best_tokens

        return SamplingKernels(best_tokens.best_tokens, triton_draw.plan_draws)
    if device.type == "cpu" and unavailable_reason() is None:
        return SamplingKernels(cpu_logits.BestTokens(), draw.plan_draws)
    return SamplingKernels(torch_logits.best_tokens, draw.plan_draws)
