"""The loaded LoRA adapters on the device, and their part of a forward pass.

LoRA (Hu et al., 2021) adds `scale * B @ A` to the weight of a linear layer, [out, in], where A is
[rank, in] and B [out, rank]. Here all adapters' A matrices are stacked in slots of `max_rank` rows.
The input is multiplied by all of them, and each token keeps only the columns of its own adapter:

```
           slot 0   slot 1   slot 2
token 0  [ ......   x A1^T   ...... ]            B0
token 1  [ x A0^T   ......   ...... ]     @      B1     added to the output of the layer
token 2  [ ......   ......   ...... ]            B2
```

These are two dense matmuls for any mix of adapters. Nothing is sorted or gathered, and no shape
depends on the adapters of a step, so a CUDA graph can capture it. The multiplications by zero cost
little, since the ranks of all slots together are far smaller than a layer is wide. On CPUs both
matrices are also kept in panels, because the bits of torch's matmul depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.lora.files import AdapterWeights, LayerSize, LayerWeights
from engine.lora.heads import Heads
from engine.model.linear import After, Format, Panels, Part, uses_panels


class Adaptable(Protocol):
    """A linear layer that sees each token of a step once, such as `engine.model.linear.Linear`."""

    in_features: int
    columns: range
    """The inputs that the rows have."""
    dtype: torch.dtype

    @property
    def parts(self) -> Mapping[str, Part]:
        """The layers of the model that are merged here, by their names, which PEFT uses too."""
        ...

    def attach(self, after: After) -> None:
        """Call `after` next after each product from now on."""
        ...


class AdapterMemory:
    """Buffers of fixed size for `num_slots` adapters of at most `max_rank`."""

    def __init__(
        self,
        linears: Sequence[Adaptable],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        *,
        is_pinned: bool = False,
        heads: Heads | None = None,
    ) -> None:
        """Attach to the linear layers, which from now on add the adapters chosen by `choose`.

        is_pinned: on CUDA, the bits of a token do not depend on the other tokens. heads: in whose
        place adapters may have their own.
        """
        self._heads = heads
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._foreign: Tensor | None = None
        """[T, num_slots * max_rank] bool: columns that do not belong to the token's adapter. Kept
        here because a linear layer is called with its input only."""
        self._slot_of_column = torch.arange(num_slots, device=device).repeat_interleave(max_rank)
        make_factors = _pinned_factors if is_pinned else _Factors
        self.factors = [make_factors(linear, num_slots * max_rank, device) for linear in linears]
        """The stacked A and B of each linear layer."""
        for linear, factors in zip(linears, self.factors, strict=True):
            linear.attach(self._adder(factors))

    @property
    def sizes(self) -> Mapping[str, LayerSize]:
        """Sizes of the whole layers that can be adapted, by name."""
        return {name: size for factors in self.factors for name, size in factors.sizes.items()}

    @property
    def head(self) -> Mapping[str, Tensor]:
        """The tensors in whose place adapters may have their own, by name."""
        return {} if self._heads is None else self._heads.own

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, and of the panels that CPUs keep of them once one is loaded."""
        return sum(
            tensor.nbytes * (2 if uses_panels(tensor.device, tensor.dtype) else 1)
            for factors in self.factors
            for tensor in (factors.down, *factors.up.values())
        )

    @torch.inference_mode()
    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Overwrite a slot with an adapter, in stream order before the next forward pass."""
        for factors in self.factors:
            factors.write(slice(slot * self.max_rank, (slot + 1) * self.max_rank), weights.layers)
        if self._heads is not None:
            self._heads.write(slot, weights.head)

    def choose(self, slots: Tensor | None) -> None:
        """Set each token's slot for the next forward pass.

        slots: [T] int64; None if no token has an adapter.
        """
        self._foreign = None if slots is None else slots[:, None] != self._slot_of_column

    def _adder(self, factors: _Factors) -> After:
        def add(rows: Tensor, outputs: Tensor) -> Tensor:
            if self._foreign is not None:
                factors.add(rows, self._foreign, outputs)
            return outputs

        return add


class _Factors:
    """A and B of all slots, for one linear layer, which may fuse several layers of the model."""

    def __init__(self, linear: Adaptable, num_columns: int, device: torch.device) -> None:
        options = {"dtype": linear.dtype, "device": device}
        self._parts = linear.parts
        self._num_columns = num_columns
        height = len(self._parts) * num_columns
        self._columns = linear.columns
        self.down = torch.zeros(height, len(linear.columns), **options)
        """[layers * num_columns, in]: the A matrices of the fused layers, one below the other. One
        matmul computes all of them, since the layers have the same input."""
        self.up = {
            name: torch.zeros(num_columns, part.rows.stop - part.rows.start, **options)
            for name, part in self._parts.items()
        }
        """B of each layer, transposed: [num_columns, out]."""
        self.packed: Sequence[Format] = ()
        """`down` and then each of `up`, in formats that multiply in place of torch. On CPUs, panels
        since the first `write`."""
        self.sizes = {
            name: LayerSize(linear.in_features, part.size or up.shape[1], linear.dtype)
            for (name, part), up in zip(self._parts.items(), self.up.values(), strict=True)
        }

    def add(self, x: Tensor, foreign: Tensor, output: Tensor) -> None:
        """Add each token's adapter to `output` [T, out], in place. x: [T, in]."""
        packed = self.packed
        inner = packed[0].multiply(x, None) if packed else F.linear(x, self.down)
        inner = inner.view(len(x), len(self.up), self._num_columns)
        inner.masked_fill_(foreign[:, None], 0)  # a 0/1 factor would not do: inf * 0 is NaN
        for index, (name, up) in enumerate(self.up.items()):
            own_output = output[:, self._parts[name].rows]
            if packed:
                own_output += packed[index + 1].multiply(inner[:, index], None)
            else:
                own_output.addmm_(inner[:, index], up)

    def write(self, columns: slice, layers: Mapping[str, LayerWeights]) -> None:
        down = self.down.view(len(self.up), self._num_columns, -1)
        for index, (name, up) in enumerate(self.up.items()):
            a, b = down[index, columns], up[columns]
            a.zero_()
            b.zero_()
            if name in layers:
                layer = layers[name]
                a[: layer.rank].copy_(layer.a[:, self._columns.start : self._columns.stop])
                order = self._parts[name].order
                b[: layer.rank].copy_((layer.b if order is None else layer.b[order]).T)
        if uses_panels(self.down.device, self.down.dtype):
            weights = [self.down, *(up.T for up in self.up.values())]
            self.packed = [Panels.of([weight], weight.dtype) for weight in weights]


def _pinned_factors(linear: Adaptable, num_columns: int, device: torch.device) -> _Factors:
    """Return factors whose products do not depend on the number of tokens, for CUDA."""
    from engine.model.pinned.loader import PinnedDense

    factors = _Factors(linear, num_columns, device)
    # The kernel needs the columns of B to be contiguous.
    factors.up = {name: up.T.contiguous().T for name, up in factors.up.items()}
    weights = [factors.down, *(up.T for up in factors.up.values())]
    factors.packed = [PinnedDense(weight) for weight in weights]
    return factors
