"""The load that every system gets, and the result of a run."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""torch's dtype names by the values of `option.dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The load test's workload `aws` in a closed loop.

    Prompts have one of three lengths. Outputs have 64, 128 or 256 tokens, because end-of-sequence
    tokens are ignored.
    """

    users: int
    requests: int
    requests_of_one: int
    """Requests that a single user sends one after another."""
    dtype: str
    quantize: str | None
    """Precision of the weights (option.quantize); None: that of the model's files."""
    seed: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Prompt length and requested output length of a request in tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one run of one system."""

    tokens_per_s: float
    """Output tokens per second with all users, from the first request to the last token."""
    tokens_per_s_of_one: float
    """Output tokens per second with a single user."""
    start_s: float
    """Seconds until the system was ready."""
    sent: list[Sent]
    """Requests in order. Prompts are counted by the server if it reports their lengths."""
