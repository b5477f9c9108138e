"""Loads and unloads the model's variants, LoRA adapters, for the clients of a server."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from core.adapter import lora_disabled
from core.errors import LongshoreError
from core.foreign_code import contained
from core.part import Part
from core.protocol.messages import (
    Failed,
    LoadAdapter,
    Performed,
    UnloadAdapter,
    Variant,
    Variants,
)
from engine.lora.adapter_registry import AdapterRegistry, slots_in_use
from engine.lora.files import AdapterWeights
from engine.serve.connection import Connection, Finished, Inbound
from engine.serve.service import StepEngine


@dataclass(frozen=True, slots=True)
class AdapterRead(Finished):
    """The result of reading a LoadAdapter's files."""

    id: str
    name: str
    src: str
    outcome: AdapterWeights | Exception


class VariantService:
    """Loads and unloads adapters while steps go on. Only the server's loop calls it.

    Each load reads its files in a new thread, which ends by putting an AdapterRead into the inbox.
    """

    def __init__(self, engine: StepEngine, connection: Connection) -> None:
        self._engine = engine
        self._registry = AdapterRegistry.of(engine.features)
        """None where `option.enable_lora` is false."""
        self._connection = connection

    @property
    def loaded(self) -> tuple[Variant, ...]:
        adapters = self._registry.loaded if self._registry is not None else ()
        return tuple(Variant(a.name, a.src, a.digest) for a in adapters)

    def parts(self, name: str) -> tuple[Part, ...]:
        """Return the parts of a request that names an adapter; '': none.

        Raises RequestError if LoRA is off and NotFoundError if no such adapter is loaded.
        """
        return self._enabled().parts(name) if name else ()

    def handle(self, client: bytes, message: Inbound) -> None:
        """Answer with Performed or Failed; a load is answered once its files are read."""
        if not isinstance(message, LoadAdapter | UnloadAdapter | AdapterRead):
            return
        try:
            adapters = self._enabled()
            match message:
                case LoadAdapter():
                    adapters.reserve(message.name, slots_in_use(self._engine.parts_in_use()))
                    reader = threading.Thread(
                        target=self._read, args=(client, message, adapters), daemon=True
                    )
                    reader.start()
                    return
                case AdapterRead(id, name, src, outcome):
                    if isinstance(outcome, Exception):
                        adapters.cancel(name)
                        self._connection.send(client, Failed.of(id, outcome))
                        return
                    adapters.install(name, src, outcome)
                case UnloadAdapter(id, name):
                    adapters.unload(name)
        except LongshoreError as error:
            self._connection.send(client, Failed.of(message.id, error))
            return
        # The broadcast first: every client knows the new list before this client hears "done".
        self._connection.broadcast(Variants(self.loaded))
        self._connection.send(client, Performed(message.id))

    def _enabled(self) -> AdapterRegistry:
        if self._registry is None:
            raise lora_disabled()
        return self._registry

    def _read(self, client: bytes, message: LoadAdapter, adapters: AdapterRegistry) -> None:
        """Read the adapter's files. Runs in a thread of its own."""
        try:
            with contained:
                outcome = adapters.read(message.src)
        except Exception as error:  # reading files may raise anything
            outcome = error
        read = AdapterRead(message.id, message.name, message.src, outcome)
        self._connection.inbox.put((client, read))
