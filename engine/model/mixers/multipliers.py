"""Falcon-H1's multipliers: constants of its config for the outputs of linear layers.

transformers multiplies some inputs instead. That is the same, as long as these layers have no bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.call import UnsupportedModelError
from engine.group import After
from engine.model.loader import Source


class Multipliers:
    def __init__(self, config: Any, device: torch.device) -> None:
        """Raises UnsupportedModelError if inputs are multiplied that meet a bias."""
        if config.attention_bias or config.mamba_proj_bias:
            raise UnsupportedModelError("its multipliers belong to layers with biases")
        into_attention = config.attention_in_multiplier
        gate, down = config.mlp_multipliers
        self._device = device
        self._by_name: Mapping[str, float | Tensor] = {
            "self_attn.q_proj": into_attention,
            "self_attn.k_proj": into_attention * config.key_multiplier,
            "self_attn.v_proj": into_attention,
            "self_attn.o_proj": config.attention_out_multiplier,
            "feed_forward.gate_proj": gate,
            "feed_forward.down_proj": down,
            "mamba.in_proj": _of_mamba(config),
            "mamba.out_proj": config.ssm_out_multiplier,
        }
        """By the ends of names; those of all outputs, or of each."""

    def __call__(self, sources: Sequence[Source]) -> Sequence[After]:
        """Return what multiplies the outputs of these layers, which are merged."""
        given = torch.cat([self._factors(source) for source in sources])
        if bool((given == 1).all()):
            return ()
        factors = given.to(self._device)
        return (lambda rows, outputs: (outputs * factors).to(outputs.dtype),)

    def _factors(self, source: Source) -> Tensor:
        """Return the factor of each output, fp32."""
        end = ".".join(source.name.split(".")[-2:])
        factors = torch.ones(source.size) * self._by_name.get(end, 1.0)
        return factors if source.order is None else factors[source.order]


def _of_mamba(config: Any) -> Tensor:
    """Return the factors of z | x | B | C | dt, [width] fp32."""
    inner = config.mamba_n_heads * config.mamba_d_head
    outer = config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, outer, outer, config.mamba_n_heads])
    factors = torch.tensor(config.ssm_multipliers, dtype=torch.float32)
    return (factors * config.ssm_in_multiplier).repeat_interleave(sizes)
