"""A faster way to compute something, which must prove on random input that it computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[..., Any]
"""Takes tensors, returns one or several."""
Sample = tuple[Tensor, ...]
"""Arguments to try functions with."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Relative error of one row of outputs: a few roundings."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates to compute what `own` does. At most one is right: trying tells which."""

    what: str
    own: Function
    candidates: Sequence[Function]
    samples: Sequence[Sample]
    install: Callable[[Function], Mapping[nn.Module, Function]]
    """Which layers need which forward, for the model to use the candidate."""

    def verified(self) -> Function | None:
        return closest(self.own, self.candidates, self.samples)


def closest(
    own: Function, candidates: Sequence[Function], samples: Sequence[Sample]
) -> Function | None:
    """The candidate nearest to `own`, if it is within the tolerance on every sample."""
    if not candidates or not samples:
        return None
    errors = [max(_error(own, each, sample) for sample in samples) for each in candidates]
    least = min(errors)
    return candidates[errors.index(least)] if least <= 1 else None


def runs(function: Function, sample: Sample) -> bool:
    return _outputs(function, sample) is not None


def _error(own: Function, candidate: Function, sample: Sample) -> float:
    """In tolerances, of the worst row; infinite for NaN, an exception, another shape or type."""
    expected, got = _outputs(own, sample), _outputs(candidate, sample)
    if expected is None or got is None:
        return float("inf")
    kinds = [[(each.shape, each.dtype) for each in outputs] for outputs in (expected, got)]
    if kinds[0] != kinds[1]:
        return float("inf")
    return max(_row_error(*pair) for pair in zip(expected, got, strict=True))


def _outputs(function: Function, sample: Sample) -> tuple[Tensor, ...] | None:
    """None where it raises, or returns what is no tensor."""
    try:
        result = function(*(each.clone() for each in sample))  # some work in place
    except Exception:  # whatever model code may raise on input that it was not made for
        return None
    outputs = result if isinstance(result, tuple) else (result,)
    return outputs if all(isinstance(each, Tensor) for each in outputs) else None


def _row_error(expected: Tensor, got: Tensor) -> float:
    exact = expected.double()
    error = (got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return error.max().nan_to_num(float("inf")).item() / TOLERANCE[expected.dtype]
