"""Mixture of experts: a router picks the top k experts of each token.

Each projection is one grouped matmul: a single call multiplies the tokens of every expert by the
weights of that expert. On CPUs each expert has a format of its own instead, because the bits of
torch's grouped matmul depend on how many tokens an expert gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ConfigurationError
from engine.model.activations import make_gated, make_plain
from engine.model.families import ExpertNames
from engine.model.linear import (
    Format,
    Linear,
    Quantized,
    Stored,
    select_rows,
    slice_columns,
    slice_rows,
    uses_panels,
)
from engine.model.loader import Loader, Source
from engine.model.mixtures.router import Router
from engine.model.published.settings import of_layer
from engine.model.quantization.experts import QuantizedExperts, TritonExperts, quantized_experts
from engine.model.quantization.weights import joined
from engine.model.spec import DecoderSpec

SHARED_COUNT_NAMES = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Config fields that may hold the number of shared experts."""
SHARED_WIDTH_NAMES = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
"""Config fields that may hold the width of all shared experts."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""gpt-oss's, which its configuration names since transformers 5.18 or later."""
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [M, K] sorted by expert, weights [E, N, K], ends [E] int32) -> [M, N]. ends[e] is the index
after the last row of expert e."""


class Experts:
    """A layer's experts and their router.

    Tokens are sorted by expert, so that each projection is one call over all experts. Nothing
    synchronizes with the device, and no shape depends on the router's choice.
    """

    def __init__(
        self, loader: Loader, spec: DecoderSpec, index: int, block: str, names: ExpertNames
    ) -> None:
        """index: of the layer. block: the mixture's name in the checkpoint."""
        width = expert_width(spec, index)
        hidden = getattr(spec.config, "moe_latent_size", None) or spec.hidden_size
        self._into_latents: Linear | None = None
        self._out_of_latents: Linear | None = None
        if hidden != spec.hidden_size:
            before, after = (f"{block}.{name}" for name in names.latents)
            self._into_latents = loader.linear([Source(before, hidden)], spec.hidden_size)
            self._out_of_latents = loader.linear([Source(after, spec.hidden_size)], hidden)
        self.route = Router(loader, spec, index, block, names)
        count, self._top_k = self.route.num_experts, self.route.top_k
        self._grouped = choose_grouped(loader.device, loader.dtype, is_pinned=loader.is_pinned)
        self._ids = torch.arange(count, device=loader.device)
        self._group = loader.group
        share = loader.group.shard.columns(width)
        weights = _Weights(loader, block, names, (count, hidden, width), share)
        self.gate_up, self.down = weights.gate_up, weights.down
        """[experts, 2 * share, hidden], gates first, and [experts, hidden, share]: each process
        has its share of every expert's width. Without gates, [experts, share, hidden]."""
        self._gate_up_bias, self._down_bias = weights.gate_up_bias, weights.down_bias
        self.activate = (
            make_gated(spec.activation, loader)
            if names.gate
            else make_plain(spec.activation, loader, block)
        )
        if names.is_interleaved:
            self._alpha = getattr(spec.config, "swiglu_alpha", SWIGLU_ALPHA)
            self._limit = getattr(spec.config, "swiglu_limit", SWIGLU_LIMIT)
            self.activate = self._clamped_swiglu
            self._sigmoid = loader.elementwise.sigmoid

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, hidden], for rows [T, hidden]."""
        return self.compute(rows, *self.route(rows))

    def compute(self, rows: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of these experts' outputs, [T, hidden]. scores, chosen: as the router's
        results."""
        if self._into_latents is not None:
            rows = self._into_latents(rows)
        by_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, self._ids, right=True, out_int32=True)
        gathered = rows.index_select(0, order // self._top_k)
        gate_up = self._multiply(gathered, self.gate_up, ends)
        if self._gate_up_bias is not None:
            gate_up = gate_up + self._gate_up_bias[by_expert]
        outputs = self._multiply(self.activate(gate_up), self.down, ends)
        if self._down_bias is not None:
            outputs = outputs + self._down_bias[by_expert]
        outputs = outputs * scores.flatten().index_select(0, order)[:, None]
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs)
        total = self._group.sum(by_token.view(len(rows), self._top_k, rows.shape[1]).sum(1))
        return total if self._out_of_latents is None else self._out_of_latents(total)

    def _multiply(self, rows: Tensor, weights: ExpertWeights, ends: Tensor) -> Tensor:
        if isinstance(weights, TritonExperts | SeparateExperts):
            return weights.multiply(rows, ends)
        dense = weights if isinstance(weights, Tensor) else weights.dense()
        return self._grouped(rows, dense, ends)

    def _clamped_swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return (up + 1) * gate * self._sigmoid(gate * self._alpha)


class SharedExperts(Experts):
    """Experts plus a shared MLP that sees every token; Qwen2-MoE weights it by a sigmoid gate, and
    Cohere 2 takes the mean of both."""

    def __init__(
        self,
        loader: Loader,
        spec: DecoderSpec,
        index: int,
        block: str,
        names: ExpertNames,
        shared: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(loader, spec, index, block, names)
        self._shared = shared
        self._gate: Linear | None = None
        if names.gates_shared:
            gate = [Source(f"{block}.{names.shared}_gate", 1)]
            self._gate = loader.linear(gate, spec.hidden_size, may_quantize=False)
        self._sigmoid = loader.elementwise.sigmoid
        strategy = getattr(spec.config, "shared_expert_combination_strategy", "sum")
        self._is_averaged = strategy == "average"

    def __call__(self, hidden: Tensor) -> Tensor:
        shared = self._shared(hidden)
        if self._gate is not None:
            shared = self._sigmoid(self._gate(hidden)) * shared
        outputs = super().__call__(hidden) + shared
        return outputs / 2 if self._is_averaged else outputs


def expert_width(spec: DecoderSpec, index: int) -> int:
    """Return the intermediate size of each expert of layer `index`."""
    config = spec.config
    return (
        of_layer(getattr(config, "moe_intermediate_size", None), index)
        or spec.layers[index].mlp_width
    )


def shared_width(spec: DecoderSpec, index: int) -> int:
    """Return the intermediate size of the shared experts of layer `index`, which are one MLP.

    0 if there are none.
    """
    config: Any = spec.config
    for name in SHARED_WIDTH_NAMES:
        if hasattr(config, name):
            return getattr(config, name)
    counts = (getattr(config, name, None) for name in SHARED_COUNT_NAMES)
    count = next((count for count in counts if count is not None), 1)
    return count * expert_width(spec, index)


class SeparateExperts:
    """The weights of one projection, [experts * out, in], with a format for each expert."""

    def __init__(self, formats: Sequence[Format], num_outputs: int) -> None:
        self.formats = formats
        self._num_outputs = num_outputs
        self.num_bytes = sum(format.num_bytes for format in formats)

    @classmethod
    def of(cls, loader: Loader, parts: Iterator[Stored], num_outputs: int) -> SeparateExperts:
        """Load parts of experts, or of several experts each, expert by expert."""
        formats: list[Format] = []
        expert: list[Stored] = []
        for part in parts:
            for start in range(0, part.shape[0], num_outputs):
                rows = range(start, min(start + num_outputs, part.shape[0]))
                expert.append(slice_rows(part, rows))
                if sum(piece.shape[0] for piece in expert) == num_outputs:
                    formats.append(loader.format(expert))
                    expert = []
        return cls(formats, num_outputs)

    def multiply(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return [M, out] for rows [M, in], sorted by expert. A row's bits depend on no other."""
        out = rows.new_empty(len(rows), self._num_outputs)
        start = 0
        for format, end in zip(self.formats, ends.tolist(), strict=True):
            if end > start:
                out[start:end] = format.multiply(rows[start:end], None)
            start = end
        return out


ExpertWeights = Tensor | QuantizedExperts | SeparateExperts


class _Weights:
    """This process's weights of all experts.

    gate_up [experts, 2 * share, hidden] with gates first, and down [experts, hidden, share].
    Without gates, gate_up is [experts, share, hidden].
    """

    def __init__(
        self,
        loader: Loader,
        block: str,
        names: ExpertNames,
        sizes: tuple[int, int, int],
        share: range,
    ) -> None:
        """sizes: the number of experts, the hidden size and the experts' width. share: this
        process's share of the width."""
        count, hidden, width = sizes
        own_rows = slice(share.start, share.stop)
        parts = [name for name in (names.gate, names.up) if name]
        self.gate_up_bias: Tensor | None = None
        self.down_bias: Tensor | None = None
        gate_up, down = (f"{block}.{name}" for name in names.merged)
        is_merged = gate_up in loader.checkpoint or loader.is_quantized(gate_up)
        if is_merged and names.is_interleaved:
            rows = torch.arange(share.start, share.stop)
            gates_first = torch.cat([2 * rows, 2 * rows + 1])  # gates and ups alternate
            gate_up_parts = _transposed(loader, gate_up, (count, hidden, 2 * width), gates_first)
            down_parts = _transposed(loader, down, (count, width, hidden), torch.arange(hidden))
            gate_up_bias = loader.checkpoint.take(f"{gate_up}_bias", count, 2 * width)
            down_bias = loader.checkpoint.take(f"{down}_bias", count, hidden)
            self._place_biases(loader, gate_up_bias[:, gates_first], down_bias)
        elif is_merged:
            gate_up_parts = (
                part[own_rows]
                for weight in loader.checkpoint.take(gate_up, count, len(parts) * width, hidden)
                for part in weight.split(width)
            )
            down_parts = iter(loader.checkpoint.take(down, count, hidden, width))
        else:
            experts = [f"{block}.experts.{index}" for index in range(count)]
            gate_up_parts = (
                slice_rows(loader.stored(f"{expert}.{name}", width, hidden), share)
                for expert in experts
                for name in parts
            )
            down_parts = (
                loader.stored(f"{expert}.{names.down}", hidden, width) for expert in experts
            )
            if f"{experts[0]}.{names.up}.bias" in loader.checkpoint:
                take = loader.checkpoint.take
                gate_up_biases = [
                    take(f"{expert}.{name}.bias", width)[own_rows]
                    for expert in experts
                    for name in parts
                ]
                down_biases = [take(f"{expert}.{names.down}.bias", hidden) for expert in experts]
                gate_up_bias = torch.stack(gate_up_biases).view(count, -1)
                self._place_biases(loader, gate_up_bias, torch.stack(down_biases))
        self.gate_up = _load(loader, gate_up_parts, count, len(parts) * len(share), range(hidden))
        self.down = _load(loader, down_parts, count, hidden, share)

    def _place_biases(self, loader: Loader, gate_up: Tensor, down: Tensor) -> None:
        """gate_up: those of this process, [experts, outputs]. down: [experts, hidden]."""
        self.gate_up_bias = loader.place(gate_up)
        if loader.group.rank == 0:  # so that the sum adds it once
            self.down_bias = loader.place(down)


def _transposed(
    loader: Loader, name: str, shape: tuple[int, int, int], order: Tensor
) -> Iterator[Stored]:
    """Yield the weights of a merged tensor: [len(order), in] of each expert, one after another.

    In MXFP4 they come as one weight, [experts * len(order), in].

    shape: the tensor's shape, [experts, in, out]. order: int64, the output to take for each row.
    """
    count, in_features, out_features = shape
    if loader.is_quantized(name):
        starts = out_features * torch.arange(count)
        weight = loader.stored(name, count * out_features, in_features)
        yield select_rows(weight, (starts[:, None] + order).flatten())
    else:
        for weight in loader.checkpoint.take(name, *shape):
            yield select_rows(weight.T, order)


def _load(
    loader: Loader, parts: Iterator[Stored], count: int, out_features: int, columns: range
) -> ExpertWeights:
    """Load parts, which together are [count * out, in], and keep only `columns` of them.

    Unquantized parts are copied once, to their place.
    """
    num_weights = count * out_features * len(columns)
    kept = (slice_columns(loader.quantized(part), columns) for part in parts)
    if uses_panels(loader.device, loader.dtype):
        experts = SeparateExperts.of(loader, kept, out_features)
        loader.count(experts.num_bytes, num_weights)
        return experts
    quantized: list[Quantized] = []
    place: Tensor | None = None
    start = 0
    for part in kept:
        if isinstance(part, Tensor):
            if place is None:
                size = count * out_features, len(columns)
                place = torch.empty(size, device=loader.device, dtype=loader.dtype)
            place[start : start + len(part)].copy_(part)
            start += len(part)
        else:
            quantized.append(part)
    if place is not None and quantized:
        raise ConfigurationError("some experts of a layer are quantized and others are not")
    if place is not None:
        loader.count(place.nbytes, num_weights)
        return place.view(count, out_features, len(columns))
    weights = joined(quantized, loader.device)
    weight = quantized_experts(
        weights, count, loader.device, loader.dtype, is_pinned=loader.is_pinned
    )
    loader.count(weight.num_bytes, num_weights)
    return weight


def choose_grouped(device: torch.device, dtype: torch.dtype, *, is_pinned: bool = False) -> Grouped:
    """Return torch's grouped matmul if it does not synchronize with the device, else our kernel.

    On CUDA, torch only has a kernel for bf16 on sm_90 and sm_100. Elsewhere it copies `ends` to the
    host and loops over the experts, which a CUDA graph cannot capture. is_pinned: for CUDA, return
    a kernel whose bits for a row do not depend on the other rows.
    """
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        if is_pinned or dtype != torch.bfloat16 or major not in (9, 10):
            # Imported only here, so that CPUs do not need Triton.
            from kernels.linear.grouped_linear import grouped_linear

            return partial(grouped_linear, is_pinned=True) if is_pinned else grouped_linear
    return _torch_grouped


def _torch_grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
