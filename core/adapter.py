"""The description of a loaded LoRA adapter, without its weights, and the error without LoRA."""

from __future__ import annotations

import msgspec

from core.errors import RequestError


class Adapter(msgspec.Struct, frozen=True):
    """A loaded adapter. Loading the same files again gives an adapter that is not equal to it."""

    name: str
    src: str
    """The directory it was read from."""
    rank: int
    """The highest rank of its layers."""
    slot: int
    """The index of its slot in device memory."""
    generation: int
    """Counts the loads of this process, from 1. No two adapters have the same generation."""


def lora_disabled(field: str = "adapters") -> RequestError:
    """Return the error of a request for an adapter where adapters are not enabled."""
    return RequestError(field, "needs option.enable_lora=true")
