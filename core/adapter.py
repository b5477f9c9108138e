"""A LoRA adapter as everything but the device sees it."""

from __future__ import annotations

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """A loaded one. Two loads are never equal, whatever their names."""

    name: str
    src: str
    """Directory that it was read from."""
    rank: int
    """The highest of its layers."""
    slot: int
    """Its place in the device's memory."""
    generation: int
    """Counts the loads of a process, from 1."""
