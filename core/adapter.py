"""A loaded LoRA adapter as data, without its weights, and the error if LoRA is off."""

from __future__ import annotations

import msgspec

from core.errors import RequestError
from core.part import Part


class Adapter(msgspec.Struct, frozen=True):
    """A loaded adapter. Loading the same files again yields a different, unequal adapter."""

    name: str
    src: str
    """The directory it was read from."""
    rank: int
    """The highest rank of its layers."""
    slot: int
    """The index of its slot in device memory."""
    digest: str
    """Of its files."""
    generation: int
    """1 for the first adapter that this process loads, 2 for the next one, and so on. Slots and
    names may be used again. Generations are not."""


class Adapted(Part):
    """The adapter of a sequence: its K/V are of use to no other one."""

    __slots__ = ("adapter", "salt")

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.salt = f"adapter {adapter.generation}"


def adapter_of(parts: tuple[Part, ...]) -> Adapter | None:
    adapted = Adapted.of(parts)
    return adapted.adapter if adapted is not None else None


def lora_disabled(field: str = "adapters") -> RequestError:
    """Return the error for a request that needs an adapter when adapters are not enabled."""
    return RequestError(field, "needs option.enable_lora=true")
