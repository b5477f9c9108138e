"""Serves text generation: requests, what they use, and variants of the model."""

from __future__ import annotations

from collections.abc import Callable

from core.errors import RequestError
from core.protocol.messages import FromEngine, NewRequest, Ready, Submit
from engine.engine import Engine
from engine.observers.ledger import Ledger
from engine.observers.payer import Payer
from engine.sampling.grammars import Grammars
from engine.serve.connection import Connection, Inbound
from engine.serve.grammar_compiler import GrammarCompiler
from engine.serve.variant_service import VariantService
from engine.vision.parts import image_parts


class TextService:
    """The `Service` of an engine that generates text."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self.engine = engine
        self._variants = VariantService(engine, connection)
        self._ledger = Ledger.of(engine.features)
        self._grammars = GrammarCompiler(Grammars.of(engine.features), connection.inbox)

    def ready(self) -> Ready:
        return Ready(self.engine.facts, self._variants.loaded)

    def prepares(self, client: bytes, message: NewRequest, arrival: float) -> bool:
        return isinstance(message, Submit) and self._grammars.compiles(client, message, arrival)

    def add(self, message: NewRequest, now: float, send: Callable[[FromEngine], bool]) -> int:
        if not isinstance(message, Submit):
            raise RequestError("task", f"this container serves {self.engine.facts.task}")
        engine = self.engine
        images = image_parts(message, engine.facts, engine.parts_in_use)
        payer = (Payer(message.api_key),) if self._ledger and message.api_key else ()
        parts = (*self._variants.parts(message.variant), *images, *payer)
        return engine.add(message.prompt_token_ids, message.params, now, parts)

    def handle(self, client: bytes, message: Inbound) -> None:
        self._variants.handle(client, message)
