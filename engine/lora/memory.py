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

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.lora.files import AdapterWeights, LayerSize, LayerWeights
from engine.lora.products import Product, Rows


class AdapterMemory:
    """Buffers of fixed size for `num_slots` adapters of at most `max_rank`."""

    def __init__(
        self, products: Sequence[Product], num_slots: int, max_rank: int, device: torch.device
    ) -> None:
        """From now on the products add what `choose` chooses."""
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._foreign: Tensor | None = None
        """[T, num_slots * max_rank]: whether a column is of another adapter than the token's. It
        lies here because linear layers, unlike attention, are handed nothing but their input."""
        self._slot_of_column = torch.arange(num_slots, device=device).repeat_interleave(max_rank)
        self._factors = [_Factors(each, num_slots * max_rank, device) for each in products]
        for product, factors in zip(products, self._factors, strict=True):
            product.module.forward = self._with_adapters(product.module.forward, factors)

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

    def _with_adapters(
        self, own: Callable[[Tensor], Tensor], factors: _Factors
    ) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            output = own(x)
            if self._foreign is not None:
                factors.add(x.flatten(0, -2), self._foreign, output.view(-1, output.shape[-1]))
            return output

        return forward


class _Factors:
    """A and B of all slots, for the layers of one product."""

    def __init__(self, product: Product, num_columns: int, device: torch.device) -> None:
        options = {"dtype": product.dtype, "device": device}
        self._rows: Mapping[str, Rows] = product.layers
        self._num_columns = num_columns
        height = len(product.layers) * num_columns
        self.down = torch.zeros(height, product.in_features, **options)
        """The A of the first layer, then those of the next: they have the same input."""
        self.up = {
            name: torch.zeros(num_columns, rows.stop - rows.start, **options)
            for name, rows in product.layers.items()
        }
        """The B of each layer, transposed."""

    def add(self, x: Tensor, foreign: Tensor, output: Tensor) -> None:
        """x: [T, in]; output: [T, out], changed in place."""
        inner = F.linear(x, self.down).view(len(x), len(self.up), self._num_columns)
        inner.masked_fill_(foreign[:, None], 0)  # not times 0: one may have overflowed
        for place, (name, up) in enumerate(self.up.items()):
            output[:, self._rows[name]].addmm_(inner[:, place], up)

    def write(self, columns: slice, layers: Mapping[str, LayerWeights]) -> None:
        down = self.down.view(len(self.up), self._num_columns, -1)
        for place, (name, up) in enumerate(self.up.items()):
            a, b = down[place, columns], up[columns]
            a.zero_()
            b.zero_()
            if name in layers:
                layer = layers[name]
                a[: layer.rank].copy_(layer.a)
                b[: layer.rank].copy_(layer.b.T)
