"""Code that all sampling kernels share: the weights of tokens, and which tokens are kept.

A score is a logit minus the row's highest, divided by the temperature: at most 0. A token's weight
is exp(score) scaled to an integer, so that sums do not depend on their order. The numbers equal
those of engine/sampling/filters.py bit by bit, so the same tokens are kept and drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import libdevice

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KEEP_ALL = 2**31 - 1
"""A limit that drops no token."""
WEIGHT_OF_ONE = tl.constexpr(2.0**44)
END_KEY = tl.constexpr(0x42000000)
"""The key of a score of -32. Tokens with this score or a lower one have a weight of 0."""
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The R rows of logits for which a token is drawn, and their parameters. Each tensor is [R]."""

    row_index: Tensor
    """int64: the row of the logits."""
    temperature: Tensor
    """fp32."""
    min_p: Tensor
    """fp32; 0 keeps all."""
    top_k: Tensor
    """int64; 0 or less keeps all."""
    top_p: Tensor
    """fp64; 1 keeps all."""
    typical_p: Tensor
    """fp64; 1 keeps all."""

    def check(self, logits: Tensor, token_ids: Tensor) -> None:
        """Raise ValueError unless the kernels take these tensors."""
        check_logits(logits)
        if token_ids.shape != logits.shape[:1] or token_ids.dtype != torch.int64:
            raise ValueError(
                f"token_ids are {list(token_ids.shape)} {token_ids.dtype} for "
                f"{logits.shape[0]} rows of logits; they must be one int64 per row"
            )
        types = {
            "row_index": torch.int64,
            "temperature": torch.float32,
            "min_p": torch.float32,
            "top_k": torch.int64,
            "top_p": torch.float64,
            "typical_p": torch.float64,
        }
        for name, dtype in types.items():
            check_vector(name, getattr(self, name), len(self.row_index), dtype)


@dataclass(frozen=True, slots=True)
class Limits:
    """Which tokens of each row top-k, top-p and typical-p keep; all tensors are [R].

    The key of a float is the bits of its magnitude, read as an integer. Keys have the same order as
    magnitudes. So a score of -1 has a greater key than a score of 0.
    """

    max_score_key: Tensor
    """int32: tokens whose score has a greater key are dropped."""
    mean_score: Tensor
    """fp32: the mean of the kept scores, weighted; 0 where typical-p keeps all."""
    max_distance_key: Tensor
    """int32: tokens whose score's distance from the mean has a greater key are dropped too."""


def check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or not logits.shape[1] or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits are {list(logits.shape)} {logits.dtype}; they must be [N, vocabulary] in "
            "fp32, fp16 or bf16, with at least one token"
        )
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous, got strides {logits.stride()}")


def check_vector(name: str, tensor: Tensor, length: int, dtype: torch.dtype) -> None:
    if tensor.shape != (length,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}; it "
            f"must be [{length}] {dtype}, contiguous"
        )


@triton.jit
def exponential(numbers):
    """Return e to the power of the numbers, with the function that torch uses on CUDA."""
    if INTERPRETED:
        return tl.exp(numbers)  # the interpreter has no libdevice
    return libdevice.exp(numbers)


@triton.jit
def load_scores(row_logits, token, width, top, temperature):
    """Return the scores of these tokens; -inf past the vocabulary's end."""
    logits = tl.load(row_logits + token, mask=token < width, other=float("-inf"))
    return tl.div_rn(logits.to(tl.float32) - top, temperature)


@triton.jit
def weigh(scores, min_p):
    """Return int64 weights: 0 for NaN, and for tokens that min-p drops."""
    shares = exponential(scores)
    return tl.where(shares >= min_p, shares * WEIGHT_OF_ONE, 0.0).to(tl.int64)


@triton.jit
def key_of(numbers):
    """Return int32 keys that order fp32 numbers by magnitude; the key of NaN is the last."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def keep(weights, scores, score_limit, mean, distance_limit):
    """Return the weights, with 0 for dropped tokens."""
    is_kept = (key_of(scores) <= score_limit) & (key_of(scores - mean) <= distance_limit)
    return tl.where(is_kept, weights, 0)
