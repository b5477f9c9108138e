"""Integer weights: codes, with a scale and a zero for each group of inputs of each output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [out, in]: `(codes - zeros) * scales`, group by group of inputs.

    Symmetric int8 q is stored as the code q + 128 with the zero 128, so that all integer
    weights have one form.
    """

    codes: Tensor
    """[out, in] uint8, each from 0 to 2**bits - 1."""
    scales: Tensor
    """[out, in / group_size] fp32."""
    zeros: Tensor
    """[out, in / group_size] uint8."""
    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale; all of them if each row has one scale (per channel)."""

    def dequantized(self) -> Tensor:
        """Return the weight, [out, in] fp32."""
        grouped = self.codes.unflatten(1, (-1, self.group_size)).float()
        return ((grouped - self.zeros[..., None].float()) * self.scales[..., None]).flatten(1)
