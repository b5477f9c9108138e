"""Loads and unloads adapters for the clients of a server, while steps go on."""

from __future__ import annotations

import threading

from core.adapter import Adapter
from core.errors import LongshoreError, RequestError
from core.messages import Adapters as Loaded
from core.messages import LoadAdapter, Performed, UnloadAdapter
from engine.engine import Engine
from engine.lora.adapters import Adapters
from engine.serve.connection import AdapterRead, Connection
from engine.serve.refusal import refusal
from engine.tasks.engine import TaskEngine

About = LoadAdapter | UnloadAdapter | AdapterRead


class AdapterDesk:
    """For the loop's thread. Files are read in threads of their own, which end with a message to
    the loop."""

    def __init__(self, engine: Engine | TaskEngine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        adapters = self._engine.adapters if isinstance(self._engine, Engine) else None
        return adapters.loaded if adapters else ()

    def handle(self, client: bytes, message: About) -> None:
        """Does what is asked or refuses it; a load is answered when its files are read."""
        try:
            if not isinstance(self._engine, Engine) or self._engine.adapters is None:
                raise RequestError("adapters", "needs option.enable_lora=true")
            self._handle(client, message, self._engine, self._engine.adapters)
        except LongshoreError as error:
            self._connection.send(client, refusal(message.id, error))

    def _handle(self, client: bytes, message: About, engine: Engine, adapters: Adapters) -> None:
        match message:
            case LoadAdapter():
                adapters.reserve(message.name, engine.adapter_slots_in_use())
                reader = threading.Thread(
                    target=self._read, args=(client, message, adapters), daemon=True
                )
                reader.start()
            case AdapterRead(id, name, src, outcome):
                if isinstance(outcome, Exception):
                    adapters.cancel(name)
                    self._connection.send(client, refusal(id, outcome))
                else:
                    adapters.install(name, src, outcome)
                    self._done(client, id)
            case UnloadAdapter(id, name):
                adapters.unload(name)
                self._done(client, id)

    def _read(self, client: bytes, asked: LoadAdapter, adapters: Adapters) -> None:
        try:
            outcome = adapters.read(asked.src)
        except Exception as error:  # whatever reading a file may raise
            outcome = error
        read = AdapterRead(asked.id, asked.name, asked.src, outcome)
        self._connection.inbox.put((client, read))

    def _done(self, client: bytes, id: str) -> None:
        """Everybody knows of it before whoever asked hears that it is done."""
        self._connection.broadcast(Loaded(self.loaded))
        self._connection.send(client, Performed(id))
