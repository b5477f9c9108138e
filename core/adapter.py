"""The description of a loaded LoRA adapter, without its weights."""

from __future__ import annotations

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """A loaded adapter. Two loads are never equal, even of the same adapter."""

    name: str
    src: str
    """The directory it was read from."""
    rank: int
    """The highest rank of its layers."""
    slot: int
    """The index of its slot in device memory."""
    generation: int
    """The number of this load in the process, from 1."""
