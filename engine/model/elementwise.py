"""Which functions normalize, activate and rotate: Triton's on CUDA, C++ on a CPU, or torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import torch_elementwise
from kernels.cpu import elementwise as cpu_elementwise
from kernels.cpu.library import what_is_lacking


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Signatures as in `kernels.torch_elementwise`."""

    rms_norm: Callable[..., Tensor]
    gated_activation: Callable[..., Tensor]
    rotary: Callable[..., None]


def make_elementwise(device: torch.device) -> Elementwise:
    if device.type == "cuda":
        # Triton is imported where its kernels run, so that the CPU does without it.
        from kernels import gated_activation, rms_norm, rotary

        return Elementwise(rms_norm.rms_norm, gated_activation.gated_activation, rotary.rotary)
    if what_is_lacking() is None:
        return Elementwise(
            cpu_elementwise.rms_norm, cpu_elementwise.gated_activation, cpu_elementwise.rotary
        )
    return Elementwise(
        torch_elementwise.rms_norm, torch_elementwise.gated_activation, torch_elementwise.rotary
    )
