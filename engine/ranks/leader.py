"""Rank 0's side of the steps that several ranks run together."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from core.configuration.step_size import StepSize
from core.plan import BlockMoves
from engine.ranks.group import RankGroup
from engine.ranks.order_types import Move, Order
from engine.ranks.shared_inputs import forward_message, pack
from engine.step.passes import Runner
from engine.step.step_inputs import StepInputs


class Leader:
    """Tells the other ranks what rank 0 is about to do.

    Every method raises EngineUnavailableError if a rank is lost; the engine cannot go on then.
    """

    def __init__(
        self,
        send: Callable[[Order], object],
        raising_cause: Callable[[], AbstractContextManager[None]],
        group: RankGroup,
    ) -> None:
        """send: sends an order to all other ranks. raising_cause: returns a context that replaces
        an error by the error of the rank at fault.

        See `engine.ranks.followers.Followers`.
        """
        self.send = send
        self._raising_cause = raising_cause
        self._group = group

    def leading(self, runner: Runner) -> Runner:
        """Return a runner that has all ranks run what `runner` runs on rank 0."""
        return _OnAllRanks(self, runner)

    def move(self, moves: BlockMoves) -> None:
        if moves:
            self.send(Move(moves))

    @contextmanager
    def forward(self, inputs: StepInputs, size: StepSize | None) -> Generator[None]:
        """Start a forward pass on the other ranks. Rank 0 runs its own within the context.

        size: the size of the CUDA graph to replay, if any.
        """
        message = forward_message(inputs, size)
        with self._raising_cause():
            self.send(message)
            self._group.broadcast(pack(inputs, message))
            yield


class _OnAllRanks:
    def __init__(self, leader: Leader, runner: Runner) -> None:
        self._leader = leader
        self._runner = runner

    def move(self, moves: BlockMoves) -> None:
        self._leader.move(moves)
        self._runner.move(moves)

    def forward(self, inputs: StepInputs, size: StepSize | None) -> Tensor:
        with self._leader.forward(inputs, size):
            return self._runner.forward(inputs, size)
