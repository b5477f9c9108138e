"""Who pays for a request: the API key that it came with."""

from __future__ import annotations

from core.part import Part


class Payer(Part):
    """Changes nothing, and names the key."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
