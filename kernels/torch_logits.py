"""What cpu/logits.py does, in torch, on any device."""

from __future__ import annotations

from torch import Tensor


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, vocabulary] → of each row the likeliest token, [N] int64, the first of several,
    and the logarithm of the sum of all exponentials, [N] fp32."""
    logits = logits.float()
    return logits.argmax(-1), logits.logsumexp(-1)
