"""LoRA adapters for offline inference. As in vLLM, a prompt's adapter is loaded on first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import RequestError
from engine.engine import Engine

if TYPE_CHECKING:
    from engine.lora.adapter_registry import AdapterRegistry


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


def load_requested(engine: Engine, requests: Iterable[LoRARequest | None]) -> None:
    """Load the adapters that are not loaded yet. If all slots are taken, unload unused ones.

    Raises RequestError if the call needs more adapters than there are slots or if an adapter cannot
    be served, and NoRoomError if running requests occupy the slots.
    """
    wanted = {request.key: request for request in requests if request is not None}
    adapters = engine.adapters
    if adapters is None:
        raise RequestError("lora_request", "needs LLM(..., enable_lora=True)")
    if len(wanted) > adapters.num_slots:
        raise RequestError(
            "lora_request",
            f"{len(wanted)} adapters in one call are more than max_loras={adapters.num_slots}",
        )
    for key, request in wanted.items():
        if key not in {adapter.name for adapter in adapters.loaded}:
            _make_room(adapters, wanted, engine.adapter_slots_in_use())
            adapters.load(key, str(request.lora_path), engine.adapter_slots_in_use())


def _make_room(adapters: AdapterRegistry, wanted: Iterable[str], in_use: set[int]) -> None:
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


def adapter_per_prompt(lora_request: LoRARequests, count: int) -> list[LoRARequest | None]:
    """Return one request or None per prompt. Raises RequestError if a list's length differs."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if len(lora_request) != count:
        raise RequestError("lora_request", f"{len(lora_request)} given for {count} prompts")
    return list(lora_request)
