"""LoRA adapters for offline inference. As in vLLM, a prompt's adapter is loaded on first use."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import RequestError
from core.part import Feature, Part
from engine.lora.adapter_registry import AdapterRegistry, slots_in_use
from engine.offline.prompts import per_prompt


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a prompt. The class and its fields are named as in vLLM.

    `lora_int_id` only tells adapters apart: the same name with another id is another adapter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    """The adapter's directory."""

    @property
    def key(self) -> str:
        """The name under which the engine loads it."""
        return f"{self.lora_name}#{self.lora_int_id}"


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or a list with one or None per prompt."""


class Parted(Protocol):
    """An engine whose requests may have parts."""

    features: tuple[Feature, ...]

    def parts_in_use(self) -> list[Part]: ...


def adapter_parts(engine: Parted, lora_request: LoRARequests, count: int) -> list[tuple[Part, ...]]:
    """Return the parts of each of `count` prompts, after loading the adapters that they need.

    If all slots are taken, unloads unused adapters. Raises RequestError if the call needs more
    adapters than there are slots, an adapter cannot be served or a list has another length than
    `count`, and NoRoomError if running requests occupy the slots.
    """
    requests = per_prompt("lora_request", lora_request, count)
    wanted = {request.key: request for request in requests if request is not None}
    if not wanted:
        return [()] * count
    adapters = AdapterRegistry.of(engine.features)
    if adapters is None:
        raise RequestError("lora_request", "needs LLM(..., enable_lora=True)")
    if len(wanted) > adapters.num_slots:
        raise RequestError(
            "lora_request",
            f"{len(wanted)} adapters in one call are more than max_loras={adapters.num_slots}",
        )
    in_use = slots_in_use(engine.parts_in_use())
    for key, request in wanted.items():
        if key not in {adapter.name for adapter in adapters.loaded}:
            _make_room(adapters, wanted, in_use)
            adapters.load(key, str(request.lora_path), in_use)
    return [adapters.parts(request.key if request else "") for request in requests]


def _make_room(adapters: AdapterRegistry, wanted: Container[str], in_use: set[int]) -> None:
    """If every slot is taken, unload the oldest adapter that is neither wanted nor in use."""
    if len(adapters.loaded) < adapters.num_slots:
        return
    idle = [
        adapter
        for adapter in adapters.loaded
        if adapter.name not in wanted and adapter.slot not in in_use
    ]
    if idle:
        adapters.unload(idle[0].name)
