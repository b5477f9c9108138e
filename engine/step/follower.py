"""A rank other than 0: carries out rank 0's orders on its own part of the model and KV cache."""

from __future__ import annotations

import torch

from engine.attention.backends import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.loading.packed_model import PackedModel
from engine.lora.files import AdapterWeights, LayerSize, LayerWeights
from engine.ranks.group import Group
from engine.ranks.order_types import AnyOrder, Forward, Install, Move
from engine.step.block_mover import BlockMover
from engine.step.shared_inputs import empty, unpack
from engine.step.step_graphs import StepGraphs


class Follower:
    """Runs orders. Raises any error of the device; the rank cannot go on then."""

    def __init__(
        self,
        model: PackedModel,
        cache: KVCache,
        backend: AttentionBackend,
        graphs: StepGraphs | None,
        group: Group,
    ) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend
        self._graphs = graphs
        self._group = group
        self._mover = BlockMover(cache, backend)

    @torch.inference_mode()
    def run(self, order: AnyOrder) -> None:
        match order:
            case Move(moves):
                self._mover.launch(moves)
            case Forward():
                self._forward(order)
            case Install():
                self._install(order)

    def _forward(self, forward: Forward) -> None:
        packed = empty(forward, self._model.device)
        self._group.broadcast(packed)
        inputs = unpack(packed, forward)
        if forward.graph is None:
            self._model.forward(inputs, PagedStep(inputs.batch, self._cache, self._backend))
            return
        assert self._graphs is not None, "all ranks capture the same graphs"
        graph = self._graphs.graph(forward.graph, has_adapters=forward.has_adapters)
        graph.replay(inputs)

    def _install(self, install: Install) -> None:
        memory = self._model.adapter_memory
        assert memory is not None, "all ranks have the same options"
        sizes = memory.sizes
        layers = {
            name: _layer(rank, a, b, sizes[name]) for name, (rank, a, b) in install.layers.items()
        }
        memory.write(install.slot, AdapterWeights(layers))


def _layer(rank: int, a: bytes, b: bytes, size: LayerSize) -> LayerWeights:
    shapes = (rank, size.in_features), (size.out_features, rank)
    # A copy, since a tensor over bytes must not be written.
    tensors = (torch.frombuffer(bytearray(data), dtype=size.dtype) for data in (a, b))
    a_tensor, b_tensor = (tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=True))
    return LayerWeights(a_tensor, b_tensor)
