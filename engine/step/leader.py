"""Rank 0's side of the steps that several ranks run together."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from core.configuration.step_size import StepSize
from core.plan import BlockMoves
from engine.inputs import StepInputs
from engine.lora.files import AdapterWeights
from engine.ranks.group import Group
from engine.ranks.messages import Install, Move, Order
from engine.step.shared_inputs import forward_message, pack


class Leader:
    """Tells the other ranks what rank 0 is about to do.

    Every method raises EngineUnavailableError if a rank is lost; the engine cannot go on then.
    """

    def __init__(
        self,
        send: Callable[[Order], object],
        raising_cause: Callable[[], AbstractContextManager[None]],
        group: Group,
    ) -> None:
        """send: sends an order to all other ranks. raising_cause: returns a context that replaces
        an error by the error of the rank at fault.

        See `engine.ranks.followers.Followers`.
        """
        self._send = send
        self._raising_cause = raising_cause
        self._group = group

    def move(self, moves: BlockMoves) -> None:
        if moves:
            self._send(Move(moves))

    @contextmanager
    def forward(self, inputs: StepInputs, size: StepSize | None) -> Generator[None]:
        """Start a forward pass on the other ranks. Rank 0 runs its own within the context.

        size: the size of the CUDA graph to replay, if any.
        """
        message = forward_message(inputs, size)
        with self._raising_cause():
            self._send(message)
            self._group.broadcast(pack(inputs, message))
            yield

    def install(self, slot: int, weights: AdapterWeights) -> None:
        """Copy an adapter into a slot of the other ranks."""
        layers = {
            name: (layer.rank, _bytes(layer.a), _bytes(layer.b))
            for name, layer in weights.layers.items()
        }
        self._send(Install(slot, layers))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
