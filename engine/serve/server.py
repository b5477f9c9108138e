"""The engine as a process: messages in, steps, messages out."""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from core.errors import EngineUnavailableError, LongshoreError, RequestError
from core.messages import (
    Abort,
    Failed,
    Generated,
    Hello,
    LoadAdapter,
    Perform,
    Performed,
    Ready,
    Step,
    Submit,
    UnloadAdapter,
)
from core.plan import Output
from core.sampling import Finish
from core.stats import Timing
from engine.engine import Engine
from engine.serve.adapters import AdapterDesk
from engine.serve.connection import (
    HEARTBEAT_INTERVAL_S,
    AdapterRead,
    Broken,
    ClientGone,
    Compiled,
    Connection,
    Inbound,
    Pulse,
)
from engine.serve.grammar_compiler import Compiling
from engine.serve.meter import Course, Meter
from engine.serve.refusal import refusal
from engine.tasks.engine import TaskEngine, TaskOutput
from engine.tasks.performer import Answer, Job

logger = logging.getLogger(__name__)

IDLE_PULSE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of a client, under the id that it gave."""

    client: bytes
    id: str
    open_answers: set[int]
    """Indices of the answers that have not ended."""
    course: Course


class Server:
    """Drives an engine for the clients of a connection, in the caller's thread."""

    def __init__(
        self, engine: Engine | TaskEngine, connection: Connection, max_waiting: int
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._max_waiting = max_waiting
        self._asked: dict[int, _Asked] = {}
        """By the engine's request id."""
        self._request_ids: dict[tuple[bytes, str], int] = {}
        self._adapters = AdapterDesk(engine, connection)
        grammars = engine.grammars if isinstance(engine, Engine) else None
        self._compiling = Compiling(grammars, connection.inbox)
        self._meter = Meter()
        self._stats_due = 0.0

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
        now, stats = time.monotonic(), self._connection.pulse.stats
        if now >= self._stats_due:
            stats = self._meter.snapshot(self._engine)
            self._stats_due = now + HEARTBEAT_INTERVAL_S
        self._connection.pulse = Pulse(now, stats)

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
                ready = Ready(self._engine.facts, self._adapters.loaded)
                self._connection.send(client, ready)
            case Submit() | Perform():
                self._submit(client, message, time.monotonic())
            case Compiled():
                self._go_on(client, message)
            case LoadAdapter() | UnloadAdapter() | AdapterRead():
                self._adapters.handle(client, message)
            case Abort():
                self._abort(client, message.id, message.index)
            case Broken(reason):
                raise EngineUnavailableError(f"the engine's socket is lost: {reason}")
            case ClientGone():
                self._compiling.forget(client)
                for owner, id in tuple(self._request_ids):
                    if owner == client:
                        self._abort(owner, id)

    def _submit(self, client: bytes, message: Submit | Perform, arrival: float) -> None:
        """Takes a request in, or refuses it."""
        key = client, message.id
        if key in self._request_ids or key in self._compiling:
            refused = Failed(message.id, "rejected", "this id is in use", "id")
        elif self._is_full():
            reason = f"{self._max_waiting} requests are waiting already"
            refused = Failed(message.id, "overloaded", reason)
        else:
            refused = self._accept(client, message, arrival)
        if refused is not None:
            self._connection.send(client, refused)

    def _go_on(self, client: bytes, compiled: Compiled) -> None:
        """With a request whose grammar is there, unless it was aborted meanwhile."""
        message, error = compiled.message, compiled.error
        if not self._compiling.release(client, message.id):
            return
        if error is None:
            self._submit(client, message, compiled.arrival)
        else:
            self._connection.send(client, refusal(message.id, error))

    def _accept(self, client: bytes, message: Submit | Perform, arrival: float) -> Failed | None:
        try:
            if self._compiling.take(client, message, arrival):
                return None
            request_id = self._add(client, message, arrival)
        except LongshoreError as error:
            return refusal(message.id, error)
        num_answers, num_prompt_tokens = 1, 0
        if isinstance(message, Submit):
            num_answers = message.params.num_answers
            num_prompt_tokens = len(message.prompt_token_ids)
        course = Course(arrival, num_prompt_tokens)
        self._asked[request_id] = _Asked(client, message.id, set(range(num_answers)), course)
        self._request_ids[client, message.id] = request_id
        return None

    def _add(self, client: bytes, message: Submit | Perform, now: float) -> int:
        """The request's id. Raises RequestError or NotFoundError for what cannot run here."""
        match message, self._engine:
            case Submit(), Engine() as engine:
                return engine.add(message.prompt_token_ids, message.params, now, message.adapter)
            case Perform(), TaskEngine() as engine:
                send = partial(self._send_part, client, message.id)
                return engine.add(Job(message.body, message.headers, send), now)
            case _:
                raise RequestError("task", f"this container serves {self._engine.facts.task}")

    def _send_part(self, client: bytes, id: str, part: Answer) -> bool:
        """Called within a step, which may last as long as the answer. Whether it is still wanted.

        What has come meanwhile is taken in first: the client may have gone.
        """
        self._between_tokens()
        if (client, id) not in self._request_ids:
            return False
        self._connection.send(client, _part(id, part, is_last=False))
        return True

    def _is_full(self) -> bool:
        """Whether one more would wait behind `max_waiting` others, once every slot is taken."""
        strategy = self._engine.strategy
        num_held = len(strategy.waiting) + len(strategy.running) + len(self._compiling)
        return num_held >= self._max_waiting + strategy.limits.max_sequences

    def _abort(self, client: bytes, id: str, index: int | None = None) -> None:
        self._compiling.release(client, id)
        request_id = self._request_ids.get((client, id))
        if request_id is None:
            return
        self._close(request_id, index)
        self._engine.abort(request_id, index if request_id in self._asked else None)

    def _close(self, request_id: int, index: int | None) -> None:
        """Forgets an answer that has ended, or all; and the request with its last one."""
        asked = self._asked[request_id]
        asked.open_answers.difference_update(asked.open_answers if index is None else {index})
        if not asked.open_answers:
            del self._asked[request_id]
            del self._request_ids[asked.client, asked.id]

    def _send_outputs(self, outputs: Sequence[Output | TaskOutput]) -> None:
        """One message a client, however many tokens of its requests the step has made."""
        steps: defaultdict[bytes, list[Generated]] = defaultdict(list)
        now = time.monotonic()
        for output in outputs:
            asked = self._asked.get(output.request_id)
            if asked is None:
                continue
            if isinstance(output, TaskOutput):
                self._meter.take_task(asked.course, output, now)
                self._connection.send(asked.client, _performed(asked.id, output))
                self._close(output.request_id, None)
            elif output.finish == Finish.ERROR:
                self._meter.take(asked.course, output, now)
                self._connection.send(asked.client, Failed(asked.id, "failed", output.failure))
                self._close(output.request_id, None)
            elif output.index in asked.open_answers:
                timing = self._meter.take(asked.course, output, now)
                steps[asked.client].append(_generated(asked.id, output, timing))
                if output.finish is not None:
                    self._close(output.request_id, output.index)
        for client, generated in steps.items():
            self._connection.send(client, Step(generated))


def _performed(id: str, output: TaskOutput) -> Performed | Failed:
    match output.outcome:
        case Answer() as answer:
            return _part(id, answer, is_last=True)
        case error:
            return refusal(id, error)


def _part(id: str, answer: Answer, *, is_last: bool) -> Performed:
    headers = dict(answer.headers)
    return Performed(id, answer.body, answer.content_type, answer.code, headers, is_last)


def _generated(id: str, output: Output, timing: Timing | None) -> Generated:
    return Generated(
        id,
        output.token_ids,
        output.logprobs,
        output.finish,
        output.index,
        top=output.top,
        prompt=output.prompt,
        timing=timing,
    )
