"""All loaded adapters on the device, and what they add to a forward pass.

LoRA (Hu et al., 2021) adds `scale * B @ A` to the weight of a linear layer, [out, in], where A is
[rank, in] and B [out, rank]. Here the matrices of all adapters lie below each other, in slots of
`max_rank` rows, and of the product with all A only what is of each token's own adapter is kept:

```
           slot 0   slot 1   slot 2
token 0  [ ......   x A1^T   ...... ]            B0
token 1  [ x A0^T   ......   ...... ]     @      B1     added to the output of the layer
token 2  [ ......   ......   ...... ]            B2
```

Two dense products, whatever the mixture: nothing is sorted or gathered, no shape depends on which
adapters a step has, and so a step can be captured. Multiplying by zeros costs little: the ranks of
all slots together are far less than a layer is wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.lora.files import AdapterWeights, LayerSize, LayerWeights
from engine.model.linear import Add, Part


class Adaptable(Protocol):
    """A linear layer that sees each token of a step once, such as `engine.model.linear.Linear`."""

    in_features: int
    dtype: torch.dtype

    @property
    def parts(self) -> Mapping[str, Part]:
        """By the names of the model's layers, which are PEFT's too."""
        ...

    def attach(self, add: Add) -> None:
        """From now on `add` is called with each product: rows [T, in], outputs [T, out]."""
        ...


class AdapterMemory:
    """Buffers of fixed size for `num_slots` adapters of at most `max_rank`."""

    def __init__(
        self, linears: Sequence[Adaptable], num_slots: int, max_rank: int, device: torch.device
    ) -> None:
        """From now on the layers add what `choose` chooses."""
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._foreign: Tensor | None = None
        """[T, num_slots * max_rank]: whether a column is of another adapter than the token's. It
        lies here because linear layers, unlike attention, are handed nothing but their input."""
        self._slot_of_column = torch.arange(num_slots, device=device).repeat_interleave(max_rank)
        self._factors = [_Factors(linear, num_slots * max_rank, device) for linear in linears]
        for linear, factors in zip(linears, self._factors, strict=True):
            linear.attach(self._adder(factors))

    @property
    def sizes(self) -> Mapping[str, LayerSize]:
        """Of the layers that an adapter may have."""
        return {
            name: LayerSize(each.down.shape[1], up.shape[1], up.dtype)
            for each in self._factors
            for name, up in each.up.items()
        }

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for each in self._factors for tensor in (each.down, *each.up.values())]
        return sum(each.nbytes for each in tensors)

    @torch.inference_mode()
    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Puts an adapter into a slot, in place of what was there, before the next forward."""
        for factors in self._factors:
            factors.write(slice(slot * self.max_rank, (slot + 1) * self.max_rank), weights.layers)

    def choose(self, slots: Tensor | None) -> None:
        """Which adapter each token of the next forward has, [T] int64; None: no token has one."""
        self._foreign = None if slots is None else slots[:, None] != self._slot_of_column

    def _adder(self, factors: _Factors) -> Add:
        def add(rows: Tensor, outputs: Tensor) -> None:
            if self._foreign is not None:
                factors.add(rows, self._foreign, outputs)

        return add


class _Factors:
    """A and B of all slots, for the parts of one linear layer."""

    def __init__(self, linear: Adaptable, num_columns: int, device: torch.device) -> None:
        options = {"dtype": linear.dtype, "device": device}
        self._parts = linear.parts
        self._num_columns = num_columns
        height = len(self._parts) * num_columns
        self.down = torch.zeros(height, linear.in_features, **options)
        """The A of the first layer, then those of the next: they have the same input."""
        self.up = {
            name: torch.zeros(num_columns, part.rows.stop - part.rows.start, **options)
            for name, part in self._parts.items()
        }
        """The B of each layer, transposed."""

    def add(self, x: Tensor, foreign: Tensor, output: Tensor) -> None:
        """x: [T, in]; output: [T, out], changed in place."""
        inner = F.linear(x, self.down).view(len(x), len(self.up), self._num_columns)
        inner.masked_fill_(foreign[:, None], 0)  # not times 0: one may have overflowed
        for place, (name, up) in enumerate(self.up.items()):
            output[:, self._parts[name].rows].addmm_(inner[:, place], up)

    def write(self, columns: slice, layers: Mapping[str, LayerWeights]) -> None:
        down = self.down.view(len(self.up), self._num_columns, -1)
        for place, (name, up) in enumerate(self.up.items()):
            a, b = down[place, columns], up[columns]
            a.zero_()
            b.zero_()
            if name in layers:
                layer = layers[name]
                a[: layer.rank].copy_(layer.a)
                order = self._parts[name].order
                b[: layer.rank].copy_((layer.b if order is None else layer.b[order]).T)
