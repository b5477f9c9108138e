"""What every system is asked to do, and what it made of that."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""By our own names: what the others call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The load test's workload `aws`: three lengths of prompt, answers of 64, 128 and 256 tokens,
    whatever the model says; everybody sends the next request once the last is answered.
    """

    users: int
    requests: int
    requests_of_one: int
    """Sent one after another by a single user."""
    dtype: str
    seed: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The sizes of a request, in tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of one system found."""

    tokens_per_s: float
    """Of answers, with all users, over the wall clock from the first request to the last token."""
    tokens_per_s_of_one: float
    """The same with a single user."""
    start_s: float
    """Until it could answer."""
    sent: list[Sent]
    """In order, as the server counts them."""
