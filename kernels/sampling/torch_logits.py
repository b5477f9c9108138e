"""The function of cpu/logits.py in torch, for any device."""

from __future__ import annotations

from torch import Tensor


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's argmax, [N] int64, and log-sum-exp, [N] fp32, for logits [N, vocab_size].

    The first token wins a tie.
    """
    logits = logits.float()
    return logits.argmax(-1), logits.logsumexp(-1)
