"""Adapters of offline inference: loaded when a prompt first names one, as vLLM does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.errors import RequestError
from engine.engine import Engine
from engine.lora.adapters import Adapters


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a prompt wants; vLLM's class and field names.

    `lora_int_id` only tells adapters apart: the same name under another id is another adapter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    """Its directory."""

    @property
    def key(self) -> str:
        """The name under which it is loaded."""
        return f"{self.lora_name}#{self.lora_int_id}"


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one for each."""


def load_requested(engine: Engine, requests: Iterable[LoRARequest | None]) -> None:
    """Loads those that are not, each in place of one that nobody wants if there is no room.

    Raises RequestError where they are too many for one call or cannot be served, NoRoomError where
    requests that run leave no room.
    """
    wanted = {each.key: each for each in requests if each is not None}
    if not wanted:
        return
    adapters = engine.adapters
    if adapters is None:
        raise RequestError("lora_request", "needs LLM(..., enable_lora=True)")
    if len(wanted) > adapters.num_slots:
        raise RequestError(
            "lora_request",
            f"{len(wanted)} adapters in one call are more than max_loras={adapters.num_slots}",
        )
    for key, request in wanted.items():
        if key not in {each.name for each in adapters.loaded}:
            _make_room(adapters, wanted, engine.adapter_slots_in_use())
            adapters.load(key, str(request.lora_path), engine.adapter_slots_in_use())


def _make_room(adapters: Adapters, wanted: Iterable[str], in_use: set[int]) -> None:
    """Unloads the adapter loaded longest ago of those that can go, if every slot is taken."""
    if len(adapters.loaded) < adapters.num_slots:
        return
    idle = [each for each in adapters.loaded if each.name not in wanted and each.slot not in in_use]
    if idle:
        adapters.unload(idle[0].name)


def one_each(lora_request: LoRARequests, count: int) -> list[LoRARequest | None]:
    """Raises RequestError where there are not as many as prompts."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if len(lora_request) != count:
        raise RequestError("lora_request", f"{len(lora_request)} given for {count} prompts")
    return list(lora_request)
