"""Builds the parts of a decoder from a checkpoint, copying each tensor once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.group import After, Group
from engine.model.checkpoint import Checkpoint
from engine.model.elementwise import Elementwise, make_elementwise
from engine.model.families import NormKind
from engine.model.linear import (
    Dense,
    Format,
    Linear,
    Part,
    Stored,
    choose_format,
    select_rows,
    slice_columns,
    uses_panels,
)
from engine.model.norms import LayerNorm, Norm, RMSNorm, SplitRMSNorm
from engine.shard import Shard


@dataclass(frozen=True, slots=True)
class Source:
    """One of the checkpoint's linear layers."""

    name: str
    size: int
    """Number of rows."""
    order: Tensor | None = None
    """[out] int64: for each output, its row in the checkpoint; None: all rows in their order."""

    @property
    def num_outputs(self) -> int:
        return self.size if self.order is None else len(self.order)


class Loader:
    """Loads tensors, linear layers and norms onto the device, in the dtype of the computation.

    A `QuantizingLoader` (`engine.model.quantization.schemes`) also loads quantized weights.
    """

    is_pinned = False
    """Whether the kernels of experts must not depend on the number of rows."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        *,
        is_transposed: bool = False,
        group: Group | None = None,
    ) -> None:
        """is_transposed: whether the checkpoint stores linear weights as [in, out].

        group: the processes that share the model; None: this process has all of it.
        """
        self.checkpoint = checkpoint
        self.device, self.dtype = device, dtype
        self.group = group or Group(device)
        self.shard = self.group.shard
        self.elementwise: Elementwise = make_elementwise(device)
        self.linears: list[Linear] = []
        """Linear layers that see each token once, so that a column may add to their outputs."""
        self.factors: Callable[[Sequence[Source]], Sequence[After]] | None = None
        """Returns what multiplies the outputs of merged linear layers; None: nothing does."""
        self.num_bytes = 0
        """Bytes of everything loaded so far."""
        self.num_weights = 0
        """Elements of everything loaded so far."""
        self._is_transposed = is_transposed

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.place(self.checkpoint.take(name, *shape))

    def optional(self, name: str, *shape: int) -> Tensor | None:
        return self.tensor(name, *shape) if name in self.checkpoint else None

    def place(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor on the device, never a view of a mapped file."""
        placed = torch.empty(tensor.shape, device=self.device, dtype=self.dtype).copy_(tensor)
        self.count(placed.nbytes, placed.numel())
        return placed

    def fp32(self, name: str, size: int, part: range | None = None) -> Tensor:
        """Load `size` numbers in fp32, [size], whatever the dtype of the computation.

        part: those of this process; None: all.
        """
        stored = self.checkpoint.take_stored(name)
        if stored.numel() != size:
            raise self.checkpoint.error(name, f"has shape {list(stored.shape)}, not {[size]}")
        numbers = stored.flatten()
        if part is not None:
            numbers = numbers[part.start : part.stop]
        placed = torch.empty(len(numbers), device=self.device).copy_(numbers)
        self.count(placed.nbytes, len(numbers))
        return placed

    def count(self, num_bytes: int, num_weights: int) -> None:
        """Add to the bytes and elements loaded so far."""
        self.num_bytes += num_bytes
        self.num_weights += num_weights

    def linear(
        self,
        sources: Sequence[Source],
        in_features: int,
        *,
        columns: range | None = None,
        is_adaptable: bool = True,
        may_quantize: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """Merge linear layers that have the same input into one `Linear`.

        columns: the inputs that this process has; if not all, outputs are summed over the group.
        None: all. is_adaptable: whether a column may add to its outputs. may_quantize: whether
        option.quantize applies to it. dtype: of the rows; None: of the computation.
        """
        columns = columns or range(in_features)
        is_partial = len(columns) < in_features
        weights, biases, parts, start = [], [], {}, 0
        for source in sources:
            weight, bias = self._weight(source, in_features), self._bias(source)
            if may_quantize:
                weight = self.quantized(weight)
            if is_partial:  # after quantizing, so that all shares have the same scales
                weight = slice_columns(weight, columns)
                bias = bias if self.group.rank == 0 else None  # so that the sum adds it once
            weights.append(weight)
            biases.append(bias)
            end = start + source.num_outputs
            parts[source.name] = Part(slice(start, end), source.order, source.size)
            start = end
        format = self.format(weights, dtype)
        self.count(format.num_bytes, start * len(columns))
        after = self.group.after_split_inputs() if is_partial else ()
        factors = () if self.factors is None else self.factors(sources)
        linear = Linear(
            format,
            self._joined(sources, biases),
            parts,
            in_features,
            dtype or self.dtype,
            columns,
            (*after, *factors),
        )
        if is_adaptable:
            self.linears.append(linear)
        return linear

    def format(self, parts: Sequence[Stored], dtype: torch.dtype | None = None) -> Format:
        """Concatenate the parts [out_i, in] of a weight, in the format of the device.

        dtype: of the rows; None: of the computation.
        """
        dense = [part for part in parts if isinstance(part, Tensor)]
        return choose_format(self.device, dtype or self.dtype)(dense)

    def embedding(self, name: str, vocab_size: int, width: int) -> Tensor:
        """Load this process's rows of an embedding, [share, width]."""
        return self.place(_vocabulary(self.checkpoint.take(name, vocab_size, width), self.shard))

    def head(self, name: str, vocab_size: int, embedding: Tensor, *, is_tied: bool) -> Linear:
        """Load this process's rows of the output projection.

        A tied head shares the embedding's tensor, unless it is quantized or packed into panels.
        """
        width = embedding.shape[1]
        if is_tied:
            format = self._tied_head(embedding)
        else:
            # [out, in] even where other linear weights are transposed (GPT-2).
            weight = _vocabulary_part(self.stored(name, vocab_size, width), self.shard)
            format = self.format([self.quantized(weight, is_head=True)])
            self.count(format.num_bytes, weight.shape[0] * width)
        bias = self._bias(Source(name, vocab_size))
        if bias is not None:
            bias = self.place(_vocabulary(bias, self.shard))
        after = self.group.after_head(vocab_size)
        return Linear(format, bias, {}, width, self.dtype, after=after)

    def _tied_head(self, embedding: Tensor) -> Format:
        """Return the head that multiplies by the embedding. Panels are a second copy of it."""
        weight = self.quantized(embedding, is_head=True)
        if isinstance(weight, Tensor) and not uses_panels(self.device, self.dtype):
            return Dense(embedding)
        format = self.format([weight])
        self.count(format.num_bytes, 0)
        return format

    def norm(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: NormKind,
        eps: float,
        order: Tensor | None = None,
        heads: range | None = None,
    ) -> Norm:
        """Load a norm.

        order: int64, permutes the last dim of its weight. heads: this process's heads, if the
        weight is [heads, width]; None: all.
        """
        weight = self.tensor(f"{name}.weight", *shape)
        if order is not None:
            weight = weight[..., order].contiguous()
        if heads is not None:
            weight = weight[heads.start : heads.stop]
        if kind.subtracts_mean:
            bias = self.optional(f"{name}.bias", *shape)
            return LayerNorm(weight + kind.offset, bias, eps, self.elementwise)
        return RMSNorm(weight, eps, kind, self.elementwise)

    def split_norm(
        self,
        name: str,
        width: int,
        columns: range,
        num_holders: int,
        kind: NormKind,
        eps: float,
        num_groups: int = 1,
    ) -> Norm:
        """Load an RMSNorm of rows [T, width]. columns: those of this process.

        num_holders: how many processes have each of these columns. num_groups: groups of columns,
        each normalized by itself; this process has columns of one.
        """
        weight = self.tensor(f"{name}.weight", width)[columns.start : columns.stop]
        group, group_width = self.group, width // num_groups
        own = columns.start // group_width
        is_own = F.one_hot(torch.tensor(own), num_groups).to(self.device)

        def mean_square(squares: Tensor) -> Tensor:
            if num_groups > 1:
                squares = squares * is_own
            return group.sum(squares / num_holders)[:, own, None] / group_width

        return SplitRMSNorm(weight, eps, kind, mean_square)

    def is_quantized(self, name: str) -> bool:
        """Whether the checkpoint's layer `name` is quantized."""
        return False

    def stored(self, name: str, size: int, in_features: int) -> Stored:
        """Take the weight [size, in_features] of the linear layer `name`, quantized or not."""
        return self.checkpoint.take(f"{name}.weight", size, in_features)

    def quantized(self, weight: Stored, *, is_head: bool = False) -> Stored:
        """Quantize a weight [out, in] by option.quantize, unless the checkpoint quantized it."""
        return weight

    def _weight(self, source: Source, in_features: int) -> Stored:
        name, size = source.name, source.size
        if self._is_transposed and f"{name}.weight" in self.checkpoint:
            weight = self.checkpoint.take(f"{name}.weight", in_features, size).T
        else:
            weight = self.stored(name, size, in_features)
        return weight if source.order is None else select_rows(weight, source.order)

    def _bias(self, source: Source) -> Tensor | None:
        if f"{source.name}.bias" not in self.checkpoint:
            return None
        bias = self.checkpoint.take(f"{source.name}.bias", source.size)
        return bias if source.order is None else bias[source.order.to(bias.device)]

    def _joined(self, sources: Sequence[Source], biases: Sequence[Tensor | None]) -> Tensor | None:
        """Concatenate biases, with zeros for layers without a bias; None if no layer has any."""
        if all(bias is None for bias in biases):
            return None
        # The CPU's C++ kernel takes biases in fp32.
        dtype = torch.float32 if uses_panels(self.device, self.dtype) else self.dtype
        joined = torch.cat(
            [
                (torch.zeros(source.num_outputs) if bias is None else bias).to(self.device, dtype)
                for source, bias in zip(sources, biases, strict=True)
            ]
        )
        self.count(joined.nbytes, joined.numel())
        return joined


def _vocabulary_part(weight: Stored, shard: Shard) -> Stored:
    """Return this process's outputs of the head, padded as `Shard.vocabulary` needs.

    A quantized weight is padded with copies of its last row. Nobody reads the padding.
    """
    if isinstance(weight, Tensor):
        return _vocabulary(weight, shard)
    share = shard.vocabulary(weight.shape[0])
    rows = torch.arange(share.start, share.stop).clamp(max=weight.shape[0] - 1)
    return weight if shard.is_whole else select_rows(weight, rows)


def _vocabulary(rows: Tensor, shard: Shard) -> Tensor:
    """Return this process's share of a vocabulary's rows [vocabulary, ...], padded with zeros."""
    share = shard.vocabulary(len(rows))
    held = rows[share.start : share.stop]
    if len(held) == len(share):
        return held
    return torch.cat([held, held.new_zeros(len(share) - len(held), *rows.shape[1:])])
