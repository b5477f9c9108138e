"""The engine as a process: messages in, steps, messages out."""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict

from core.errors import EngineUnavailableError, RequestError
from core.messages import (
    Abort,
    Failed,
    Generated,
    Hello,
    Ready,
    Step,
    Submit,
)
from core.plan import Output
from core.sampling import Finish
from engine.connection import Broken, ClientGone, Connection, Inbound, Pulse
from engine.engine import Engine

logger = logging.getLogger(__name__)

IDLE_PULSE_S = 0.5


class Server:
    """Drives an engine for the clients of a connection, in the caller's thread."""

    def __init__(self, engine: Engine, connection: Connection, max_waiting: int) -> None:
        self._engine = engine
        self._connection = connection
        self._max_waiting = max_waiting
        self._requests: dict[int, tuple[bytes, str]] = {}
        """Sequence id → client and the id it gave."""
        self._sequence_ids: dict[tuple[bytes, str], int] = {}

    def serve_forever(self) -> None:
        """Returns never; raises what ends the engine."""
        while True:
            self._receive(self._idle_seconds())
            self._send_outputs(self._engine.step(time.monotonic(), self._between_tokens))
            self._beat()

    def _between_tokens(self) -> None:
        """Keeps a long run of `generate` from being deaf: to aborts, above all."""
        self._receive(0)
        self._beat()

    def _beat(self) -> None:
        strategy = self._engine.strategy
        self._connection.pulse = Pulse(
            time.monotonic(), len(strategy.running), len(strategy.waiting)
        )

    def _receive(self, timeout: float) -> None:
        """Takes in all messages that are there; waits that many seconds for the first."""
        while True:
            try:
                client, message = self._connection.inbox.get(timeout > 0, timeout)
            except queue.Empty:
                return
            self._handle(client, message)
            timeout = 0

    def _idle_seconds(self) -> float:
        if self._engine.strategy.running:
            return 0
        if not self._engine.has_work():
            return IDLE_PULSE_S
        wake_at = self._engine.strategy.wake_at()
        return 0 if wake_at is None else min(max(0.0, wake_at - time.monotonic()), IDLE_PULSE_S)

    def _handle(self, client: bytes, message: Inbound) -> None:
        match message:
            case Hello():
                self._connection.send(client, Ready(self._engine.facts))
            case Submit():
                refusal = self._submit(client, message)
                if refusal is not None:
                    self._connection.send(client, refusal)
            case Abort():
                self._abort(client, message.id)
            case Broken(reason):
                raise EngineUnavailableError(f"the engine's socket is lost: {reason}")
            case ClientGone():
                for owner, id in tuple(self._sequence_ids):
                    if owner == client:
                        self._abort(owner, id)

    def _submit(self, client: bytes, message: Submit) -> Failed | None:
        if (client, message.id) in self._sequence_ids:
            return Failed(message.id, "rejected", "this id is in use", "id")
        if self._is_full():
            return Failed(
                message.id, "overloaded", f"{self._max_waiting} requests are waiting already"
            )
        try:
            sequence_id = self._engine.add(
                message.prompt_token_ids, message.params, time.monotonic()
            )
        except RequestError as error:
            return Failed(message.id, "rejected", error.message, error.field)
        self._requests[sequence_id] = client, message.id
        self._sequence_ids[client, message.id] = sequence_id
        return None

    def _is_full(self) -> bool:
        """Whether one more would wait behind `max_waiting` others, once every slot is taken."""
        strategy = self._engine.strategy
        num_held = len(strategy.waiting) + len(strategy.running)
        return num_held >= self._max_waiting + strategy.limits.max_sequences

    def _abort(self, client: bytes, id: str) -> None:
        sequence_id = self._sequence_ids.pop((client, id), None)
        if sequence_id is not None:
            del self._requests[sequence_id]
            self._engine.abort(sequence_id)

    def _send_outputs(self, outputs: list[Output]) -> None:
        """One message a client, however many of its requests the step has moved."""
        steps: defaultdict[bytes, list[Generated]] = defaultdict(list)
        for output in outputs:
            client, id = self._requests[output.sequence_id]
            if output.finish == Finish.ERROR:
                self._connection.send(client, Failed(id, "failed", self._engine.last_failure))
            else:
                steps[client].append(
                    Generated(
                        id,
                        output.token_ids,
                        output.logprobs,
                        output.finish,
                        top=output.top,
                        prompt=output.prompt,
                    )
                )
            if output.finish is not None:
                del self._requests[output.sequence_id]
                del self._sequence_ids[client, id]
        for client, generated in steps.items():
            self._connection.send(client, Step(generated))
