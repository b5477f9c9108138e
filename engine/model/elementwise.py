"""Selects elementwise kernels: Triton on CUDA, C++ on a CPU, torch if there is no compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import elementwise as cpu_elementwise
from kernels.cpu.shared_library import unavailable_reason
from kernels.elementwise import torch_elementwise


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The elementwise kernels of a device, with the signatures of
    `kernels.elementwise.torch_elementwise`."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    gated_activation: Callable[..., Tensor]
    rotary: Callable[..., None]
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor] = torch_elementwise.sigmoid_gate
    layer_norm: Callable[..., Tensor] = torch_elementwise.layer_norm
    norms_all_heads: bool = False
    """Whether one call of `rms_norm` can norm heads with different weights."""


def make_elementwise(device: torch.device) -> Elementwise:
    if device.type == "cuda":
        # Imported only here, so that CPUs do not need Triton.
        from kernels.elementwise import gated_activation, rms_norm, rotary

        return Elementwise(
            rms_norm.rms_norm,
            rms_norm.add_rms_norm,
            gated_activation.gated_activation,
            rotary.rotary,
            norms_all_heads=True,
        )
    if device.type == "cpu" and unavailable_reason() is None:
        return Elementwise(
            cpu_elementwise.rms_norm,
            _cpu_add_rms_norm,
            cpu_elementwise.gated_activation,
            cpu_elementwise.rotary,
            cpu_elementwise.sigmoid,
            cpu_elementwise.sigmoid_gate,
            cpu_elementwise.layer_norm,
        )
    return Elementwise(
        torch_elementwise.rms_norm,
        torch_elementwise.add_rms_norm,
        torch_elementwise.gated_activation,
        torch_elementwise.rotary,
    )


def _cpu_add_rms_norm(
    hidden: Tensor, output: Tensor, weight: Tensor, eps: float, **form: Any
) -> tuple[Tensor, Tensor]:
    total = hidden + output
    return total, cpu_elementwise.rms_norm(total, weight, eps, **form)
