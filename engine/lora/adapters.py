"""Which adapters are loaded, under which names, and where."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from core.adapter import Adapter
from core.errors import ConflictError, NoRoomError, NotFoundError
from engine.lora.files import AdapterWeights, read_adapter
from engine.lora.memory import AdapterMemory


class Adapters:
    """Owned by one loop; `read` alone may be called in any thread.

    An adapter that is loaded takes three calls, so that its files can be read while steps go on:
    `reserve`, `read`, `install`; or `cancel` in place of the last.
    """

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory
        self._loaded: dict[str, Adapter] = {}
        self._reserved: dict[str, int] = {}
        """Slots of adapters whose files are being read, by name."""
        self._num_loads = 0

    @property
    def num_slots(self) -> int:
        return self._memory.num_slots

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The one loaded longest ago first."""
        return tuple(self._loaded.values())

    def find(self, name: str) -> Adapter:
        """Raises NotFoundError."""
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise NotFoundError(f"no adapter '{name}' is loaded; those that are: {known}")
        return self._loaded[name]

    def load(self, name: str, src: str, in_use: Collection[int] = ()) -> Adapter:
        """All three calls. Raises what they raise; nothing is changed then."""
        self.reserve(name, in_use)
        try:
            weights = self.read(src)
        except BaseException:
            self.cancel(name)
            raise
        return self.install(name, src, weights)

    def reserve(self, name: str, in_use: Collection[int] = ()) -> None:
        """Keeps a slot for it. in_use: slots that requests use, whether or not their adapters are
        still loaded.

        Raises ConflictError where the name is taken, NoRoomError where there is no slot.
        """
        if name in self._loaded or name in self._reserved:
            raise ConflictError(f"adapter '{name}' is loaded already; unload it first")
        kept = {*(each.slot for each in self._loaded.values()), *self._reserved.values()}
        free = set(range(self.num_slots)) - kept - set(in_use)
        if not free:
            num_ending = self.num_slots - len(kept)
            raise NoRoomError(
                f"no room for adapter '{name}': {len(kept)} are loaded, {num_ending} unloaded but "
                f"in use, and option.max_loras is {self.num_slots}; unload one, or raise it"
            )
        self._reserved[name] = min(free)

    def read(self, src: str) -> AdapterWeights:
        """The adapter in that directory. Raises RequestError where it cannot be served."""
        return read_adapter(Path(src), self._memory.sizes, self._memory.max_rank)

    def install(self, name: str, src: str, weights: AdapterWeights) -> Adapter:
        """Copies it into its slot; from now on requests find it."""
        slot = self._reserved.pop(name)
        self._memory.write(slot, weights)
        self._num_loads += 1
        adapter = Adapter(name, src, weights.rank, slot, self._num_loads)
        self._loaded[name] = adapter
        return adapter

    def cancel(self, name: str) -> None:
        """Gives back what was reserved."""
        del self._reserved[name]

    def unload(self, name: str) -> None:
        """No new request finds it. Raises NotFoundError."""
        del self._loaded[self.find(name).name]
