"""torch.compile over a whole forward pass, with attention as one opaque operator.

The compiler sees norms, projections, rotary embedding and activations, and fuses what lies between
the matrix products. Attention it must not see: K/V memory is changed in place, and what is where is
known to the step alone. So the operator's arguments are the layer's tensors and the number of a
`CompiledForward`, which knows the step that runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from engine.attention import AttendsPaged, AttentionCall

Forward = Callable[[Tensor, Tensor, Tensor, AttendsPaged], Tensor]
"""(input_ids [1, T], position_ids [1, T], sampled_rows [S], paged) → logits."""

_numbers = itertools.count()
_forwards: WeakValueDictionary[int, CompiledForward] = WeakValueDictionary()
"""By number, as an operator takes no objects."""


class CompiledForward:
    """Compiled once, here, for any number of tokens and rows.

    The compiler takes a size of 1 for a constant, so one token gets a second beside it, which
    attention never sees, and one row likewise.
    """

    def __init__(self, forward: Forward, device: torch.device, backend: str) -> None:
        self._number = next(_numbers)
        self._compiled: Forward = torch.compile(
            forward, fullgraph=True, dynamic=True, backend=backend
        )
        self._stand_in = _StandIn(self._number)
        self._step: AttendsPaged = _Nothing()
        self._num_tokens = 0
        _forwards[self._number] = self
        # The first call compiles. It takes equal sizes to be always equal: these are not.
        tokens = torch.zeros(1, 7, dtype=torch.int64, device=device)
        with torch.inference_mode():
            self(tokens, tokens, torch.arange(3, device=device), self._step)

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, paged: AttendsPaged
    ) -> Tensor:
        num_rows = rows.shape[0]
        self._step, self._num_tokens = paged, input_ids.shape[1]
        ids, positions = (_at_least_two(each, 1) for each in (input_ids, position_ids))
        return self._compiled(ids, positions, _at_least_two(rows, 0), self._stand_in)[:num_rows]

    def attend(self, call: AttentionCall) -> Tensor:
        """Of the step that runs, without the token that was put beside a single one."""
        num_padded, num_tokens = call.query.shape[0], self._num_tokens
        if num_padded == num_tokens:
            return self._step.attend(call)
        query, key, value = (each[:num_tokens] for each in (call.query, call.key, call.value))
        attended = self._step.attend(replace(call, query=query, key=key, value=value))
        return torch.cat(
            [attended, attended.new_zeros(num_padded - num_tokens, *attended.shape[1:])]
        )


def _at_least_two(tensor: Tensor, dim: int) -> Tensor:
    """A copy, so that tensors are always alike: the compiler also minds what they are views of."""
    shape = list(tensor.shape)
    shape[dim] = max(0, 2 - shape[dim])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


class _Nothing:
    def attend(self, call: AttentionCall) -> Tensor:
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1])


class _StandIn:
    """What the compiler sees in place of the step."""

    def __init__(self, number: int) -> None:
        self._number = number

    def attend(self, call: AttentionCall) -> Tensor:
        return _attend(
            call.query,
            call.key,
            call.value,
            call.sinks,
            self._number,
            call.layer,
            call.scale,
            call.window,
            call.softcap,
        )


# No mutated argument is declared: K/V memory is none of them, and that every output is used keeps
# the calls in order.
@torch.library.custom_op("longshore::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    number: int,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    call = AttentionCall(layer, query, key, value, scale, window, softcap, sinks)
    return _forwards[number].attend(call)


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    number: int,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])
