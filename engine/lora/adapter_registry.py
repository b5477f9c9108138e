"""The registry of loaded adapters: their names and slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from core.adapter import Adapted, Adapter
from core.errors import ConflictError, NoRoomError, NotFoundError
from core.part import Part
from core.protocol.stats import Info
from engine.group import SharedFeature
from engine.lora.changes import decoded, encoded
from engine.lora.files import AdapterWeights, read_adapter
from engine.lora.memory import AdapterMemory


class AdapterRegistry(SharedFeature):
    """Loads and unloads adapters. Not thread-safe, except `read`.

    Loading takes three calls, so that files can be read while steps go on: `reserve`, `read` and
    `install`; or `cancel` instead of `install`.
    """

    def __init__(self, memory: AdapterMemory) -> None:
        self.memory = memory
        self._loaded: dict[str, Adapter] = {}
        self._reserved: dict[str, int] = {}
        """Slots of adapters whose files are being read, by name."""
        self._num_loads = 0
        self._send: Callable[[bytes], object] | None = None
        """Sends a change to the others of the group, if there are any."""

    @property
    def num_slots(self) -> int:
        return self.memory.num_slots

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The loaded adapters, the oldest first."""
        return tuple(self._loaded.values())

    def find(self, name: str) -> Adapter:
        """Return a loaded adapter. Raises NotFoundError."""
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise NotFoundError(
                f"no adapter '{name}' is loaded; the loaded adapters: {known}; to use the model "
                "without an adapter, name none, or name the model itself"
            )
        return self._loaded[name]

    def share(self, send: Callable[[bytes], object]) -> None:
        self._send = send

    def carry_out(self, change: bytes) -> None:
        slot, weights = decoded(change, self.memory.sizes)
        self.memory.write(slot, weights)

    def parts(self, name: str) -> tuple[Part, ...]:
        """Return the parts of a request that names an adapter; '': none. Raises NotFoundError."""
        return (Adapted(self.find(name)),) if name else ()

    def info(self, running: Collection[Part], waiting: Collection[Part]) -> Info:
        labels = {
            "max_lora": str(self.num_slots),
            "running_lora_adapters": ",".join(_names_in(running)),
            "waiting_lora_adapters": ",".join(_names_in(waiting)),
        }
        doc = "Adapters of running and waiting requests, as labels. The value is the time."
        return Info("vllm:lora_requests_info", doc, labels)

    def load(self, name: str, src: str, in_use: Collection[int] = ()) -> Adapter:
        """Reserve, read and install. If one of them raises, nothing is changed."""
        self.reserve(name, in_use)
        try:
            weights = self.read(src)
        except BaseException:
            self.cancel(name)
            raise
        return self.install(name, src, weights)

    def reserve(self, name: str, in_use: Collection[int] = ()) -> None:
        """Reserve a slot for an adapter.

        in_use: slots that requests use, including slots of adapters that are no longer loaded.

        Raises ConflictError if the name is taken and NoRoomError if no slot is free.
        """
        if name in self._reserved:
            raise ConflictError(f"adapter '{name}' is being loaded")
        if name in self._loaded:
            raise ConflictError(f"adapter '{name}' is loaded already; unload it first")
        kept = {*(adapter.slot for adapter in self._loaded.values()), *self._reserved.values()}
        free = set(range(self.num_slots)) - kept - set(in_use)
        if not free:
            num_ending = self.num_slots - len(kept)
            raise NoRoomError(
                f"no room for adapter '{name}': {len(kept)} adapters are loaded or being loaded, "
                f"{num_ending} are unloaded but still in use, and option.max_loras is "
                f"{self.num_slots}; unload an adapter, or raise option.max_loras"
            )
        self._reserved[name] = min(free)

    def read(self, src: str) -> AdapterWeights:
        """Read the adapter in the directory `src`. Raises RequestError if it cannot be served."""
        return read_adapter(Path(src), self.memory.sizes, self.memory.max_rank, self.memory.head)

    def install(self, name: str, src: str, weights: AdapterWeights) -> Adapter:
        """Copy the weights into the reserved slot. From now on, requests can use the adapter."""
        slot = self._reserved.pop(name)
        if self._send is not None:
            self._send(encoded(slot, weights))
        self.memory.write(slot, weights)
        self._num_loads += 1
        adapter = Adapter(name, src, weights.rank, slot, weights.digest, self._num_loads)
        self._loaded[name] = adapter
        return adapter

    def cancel(self, name: str) -> None:
        """Release a reserved slot."""
        del self._reserved[name]

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that use it go on. Raises NotFoundError."""
        del self._loaded[self.find(name).name]


def slots_in_use(parts: Iterable[Part]) -> set[int]:
    """Return the slots of the adapters that are among the parts of running and waiting requests.

    Other slots may be overwritten even while a step is in flight: the device runs the copy after
    that step.
    """
    return {part.adapter.slot for part in parts if isinstance(part, Adapted)}


def _names_in(parts: Iterable[Part]) -> list[str]:
    return sorted({part.adapter.name for part in parts if isinstance(part, Adapted)})
