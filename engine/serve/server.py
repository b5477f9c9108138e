"""The main loop of the engine process: handles messages, runs steps and sends the outputs."""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec

from core.errors import LongshoreError, OverloadedError, RequestError
from core.foreign_code import contained
from core.output import Output
from core.protocol.messages import (
    Abort,
    Failed,
    FromEngine,
    Heartbeat,
    Hello,
    LoadAdapter,
    Perform,
    Performed,
    Ready,
    Refused,
    Step,
    Submit,
    UnloadAdapter,
    Watch,
)
from core.sampling import Finish
from engine.engine import Engine
from engine.serve.adapter_service import AdapterService
from engine.serve.connection import (
    HEARTBEAT_INTERVAL_S,
    AdapterRead,
    ClientGone,
    Compiled,
    Connection,
    ConnectionBroken,
    Inbound,
    Pulse,
    failed,
)
from engine.serve.emf import EmfReporter
from engine.serve.grammar_compiler import GrammarCompiler, num_prompt_tokens
from engine.serve.host_time import HostTime
from engine.serve.meter import WORKER_LOST, Meter, RequestProgress
from engine.serve.watchers import MIN_INTERVAL_S, Watchers
from engine.tasks.engine import TaskEngine, TaskOutput
from engine.tasks.performer import Answer, Job

logger = logging.getLogger(__name__)

IDLE_PULSE_S = 0.5
"""Longest wait for a message, so that the pulse stays fresh while nothing runs."""


@dataclass(frozen=True, slots=True)
class _ClientRequest:
    """A request that the engine has accepted and not finished."""

    client: bytes
    id: str
    """The id that the client chose."""
    open_answers: set[int]
    """Indices of the answers that have not ended."""
    progress: RequestProgress


class Server:
    """Runs an engine for the clients of a connection, in the caller's thread."""

    def __init__(
        self,
        engine: Engine | TaskEngine,
        connection: Connection,
        max_waiting: int,
        *,
        max_waiting_tokens: int | None = None,
        reporter: EmfReporter | None = None,
    ) -> None:
        """max_waiting: requests that may wait beyond those that fit into a batch.

        max_waiting_tokens: prompt tokens that may wait.
        reporter: gets the statistics whenever the loop has done a step or waited.
        """
        self._engine = engine
        self._connection = connection
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._requests: dict[int, _ClientRequest] = {}
        """By the engine's request id."""
        self._request_ids: dict[tuple[bytes, str], int] = {}
        """The engine's request ids, by client and the client's id."""
        self._adapters = AdapterService(engine, connection)
        grammars = engine.grammars if isinstance(engine, Engine) else None
        self._grammar_compiler = GrammarCompiler(grammars, connection.inbox)
        self._meter = Meter()
        self._host_time = HostTime(engine.model_time)
        self._watchers = Watchers(engine.strategy, connection.send, self._first_token)
        self._stats_due = 0.0
        self._was_idle = True
        self._reporter = reporter

    def serve_forever(self) -> None:
        """Serve until an error ends the engine, and raise it."""
        while True:
            self._receive(self._idle_seconds())
            num_before = self._engine.num_step_tokens
            outputs = self._engine.step(time.monotonic(), self._between_tokens)
            if num_tokens := self._engine.num_step_tokens - num_before:
                self._meter.record_step(num_tokens)
            messages = self._messages_of(outputs)
            # Before the messages: a client that gets its last token finds it counted in /metrics.
            self._update_pulse()
            for client, message in messages:
                self._connection.send(client, message)

    def _between_tokens(self) -> None:
        """Handle messages, above all aborts, within a step that generates whole answers."""
        self._receive(0)
        self._update_pulse()

    def _update_pulse(self) -> None:
        now, stats = time.monotonic(), self._connection.pulse.stats
        is_idle = not self._engine.has_work()
        has_become_idle = is_idle and not self._was_idle
        self._was_idle = is_idle
        if now >= self._stats_due or has_become_idle:
            stats = self._meter.snapshot(self._engine, self._host_time.seconds())
            self._stats_due = now + HEARTBEAT_INTERVAL_S
        self._connection.pulse = Pulse(now, stats)
        if self._reporter is not None:
            self._reporter.tick(self._engine.facts, stats, now)
        if has_become_idle:
            # Otherwise /metrics would show ended requests until the next heartbeat.
            self._connection.broadcast(Heartbeat(0.0, stats))
        if self._watchers:
            self._watchers.update()

    def _receive(self, timeout_s: float) -> None:
        """Handle all messages in the inbox. Wait up to `timeout_s` for the first."""
        while True:
            try:
                with self._host_time.idle if timeout_s > 0 else nullcontext():
                    client, message = self._connection.inbox.get(timeout_s > 0, timeout_s)
            except queue.Empty:
                return
            self._handle(client, message)
            timeout_s = 0

    def _idle_seconds(self) -> float:
        """Return how long the loop may wait for a message before the next step."""
        if self._engine.strategy.running:
            return 0
        idle_s = MIN_INTERVAL_S if self._watchers else IDLE_PULSE_S
        if not self._engine.has_work():
            return idle_s
        wake_at = self._engine.wake_at()
        return 0 if wake_at is None else min(max(0.0, wake_at - time.monotonic()), idle_s)

    def _handle(self, client: bytes, message: Inbound) -> None:
        match message:
            case Hello():
                ready = Ready(self._engine.facts, self._adapters.loaded)
                self._connection.send(client, ready)
            case Submit() | Perform():
                self._submit(client, message, time.monotonic(), is_new=True)
            case Compiled():
                self._take_compiled(client, message)
            case LoadAdapter() | UnloadAdapter() | AdapterRead():
                self._adapters.handle(client, message)
            case Abort(id, index, reason):
                self._abort(client, id, index, reason)
            case Refused(counts):
                self._meter.record_refusals(counts)
            case ConnectionBroken(error):
                raise error
            case Watch(seconds):
                self._watchers.add(client, seconds)
            case ClientGone():
                self._watchers.remove(client)
                self._abort_all(client)

    def _take_compiled(self, client: bytes, compiled: Compiled) -> None:
        submit = compiled.message
        if self._grammar_compiler.release(client, submit.id) is None:
            return  # aborted while its grammar was compiled
        if compiled.error is None:
            self._submit(client, submit, compiled.arrival)
        else:
            self._connection.send(client, failed(submit.id, compiled.error))

    def _submit(
        self, client: bytes, message: Submit | Perform, arrival: float, *, is_new: bool = False
    ) -> None:
        """Add a request to the engine once its grammar is compiled, or answer with Failed.

        is_new: whether a full queue may refuse it. False for one that waited for its grammar.
        """
        try:
            with contained:
                added = self._add(client, message, arrival, is_new=is_new)
        except Exception as error:  # whatever goes wrong belongs to this request alone
            if not isinstance(error, LongshoreError):
                logger.exception("request not added id=%s", message.id)
            self._connection.send(client, failed(message.id, error))
            return
        if added is None:
            return
        request_id, progress = added
        open_answers = set(range(progress.num_answers))
        request = _ClientRequest(client, message.id, open_answers, progress)
        self._requests[request_id] = request
        self._request_ids[client, message.id] = request_id

    def _add(
        self, client: bytes, message: Submit | Perform, arrival: float, *, is_new: bool
    ) -> tuple[int, RequestProgress] | None:
        """Add a request to the engine. Return None if its grammar must be compiled first."""
        key = client, message.id
        if key in self._request_ids or key in self._grammar_compiler:
            raise RequestError("id", "this id is in use")
        if is_new:
            self._check_queue(message)
        if self._grammar_compiler.take(client, message, arrival):
            return None
        match message, self._engine:
            case Submit(), Engine() as engine:
                progress = RequestProgress.of(message, arrival)
                prompt, params = message.prompt_token_ids, message.params
                id = engine.add(prompt, params, arrival, message.adapter, message.images)
                return id, progress
            case Perform(), TaskEngine() as engine:
                send = partial(self._send_part, client, message.id)
                job = Job(message.body, message.headers, send)
                return engine.add(job, arrival), RequestProgress(arrival)
            case _:
                raise RequestError("task", f"this container serves {self._engine.facts.task}")

    def _send_part(self, client: bytes, id: str, part: Answer) -> bool:
        """Send a part of a task's answer. Return False if the request was aborted.

        Called within a step, which lasts until the answer is complete. Handles waiting messages
        first, since the client may have disconnected.
        """
        self._between_tokens()
        if (client, id) not in self._request_ids:
            return False
        self._connection.send(client, _part(id, part, is_last=False))
        return True

    def _check_queue(self, message: Submit | Perform) -> None:
        """Raise OverloadedError if the request does not fit into the queue.

        The queue holds `max_waiting` requests beyond those that fit into a batch. Their prompts may
        have `max_waiting_tokens` tokens; a single request may have any number.
        """
        strategy = self._engine.strategy
        num_held = len(strategy.waiting) + len(strategy.running) + len(self._grammar_compiler)
        if num_held >= self._max_waiting + strategy.limits.max_sequences:
            raise OverloadedError(
                f"{self._max_waiting} requests are waiting already (job_queue_size)"
            )
        if self._max_waiting_tokens is None or not isinstance(message, Submit):
            return
        waiting = strategy.num_waiting_tokens + self._grammar_compiler.num_waiting_tokens
        num_tokens = num_prompt_tokens(message)
        if waiting and waiting + num_tokens > self._max_waiting_tokens:
            raise OverloadedError(
                f"{waiting} prompt tokens are waiting already, and {num_tokens} more would exceed "
                f"{self._max_waiting_tokens} (option.job_queue_tokens)"
            )

    def _abort_all(self, client: bytes) -> None:
        for owner, id in (*self._request_ids, *self._grammar_compiler):
            if owner == client:
                self._abort(owner, id, None, WORKER_LOST)

    def _abort(self, client: bytes, id: str, index: int | None, reason: str) -> None:
        now = time.monotonic()
        held = self._grammar_compiler.release(client, id)
        if held is not None:
            answers = range(held.params.num_answers)
            self._meter.record_abort(RequestProgress.of(held, now), answers, reason, now)
        request_id = self._request_ids.get((client, id))
        if request_id is None:
            return
        request = self._requests[request_id]
        open_before = frozenset(request.open_answers)
        self._close(request_id, index)
        ended = open_before - request.open_answers
        timings = self._meter.record_abort(request.progress, ended, reason, now)
        for answer, timing in timings.items():
            self._watchers.note_end(request_id + answer, timing)
        self._engine.abort(request_id, index if request_id in self._requests else None)

    def _close(self, request_id: int, index: int | None) -> None:
        """Close an answer, or all if `index` is None. Forget the request with its last answer."""
        request = self._requests[request_id]
        request.open_answers.difference_update(request.open_answers if index is None else {index})
        if not request.open_answers:
            del self._requests[request_id]
            del self._request_ids[request.client, request.id]

    def _first_token(self, request_id: int) -> float | None:
        request = self._requests.get(request_id)
        return request.progress.first_token if request is not None else None

    def _messages_of(
        self, outputs: Sequence[Output | TaskOutput]
    ) -> list[tuple[bytes, FromEngine]]:
        """Count a step's outputs, and return the messages to the clients.

        Each client gets its new tokens in one Step message.
        """
        messages: list[tuple[bytes, FromEngine]] = []
        steps: defaultdict[bytes, list[tuple[str, Output]]] = defaultdict(list)
        now = time.monotonic()
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            if isinstance(output, TaskOutput):
                self._meter.record_task(request.progress, output, now)
                messages.append((request.client, _performed(request.id, output)))
                self._close(output.request_id, None)
            elif output.finish == Finish.ERROR:
                self._meter.record(request.progress, output, now)
                kind = "rejected" if output.failed_field else "failed"
                failure = Failed(request.id, kind, output.failure, output.failed_field)
                messages.append((request.client, failure))
                self._close(output.request_id, None)
            elif output.index in request.open_answers:
                timing = self._meter.record(request.progress, output, now)
                if timing is not None:
                    output = msgspec.structs.replace(output, timing=timing)
                    self._watchers.note_end(output.request_id + output.index, timing)
                steps[request.client].append((request.id, output))
                if output.finish is not None:
                    self._close(output.request_id, output.index)
        messages += ((client, Step(outputs)) for client, outputs in steps.items())
        return messages


def _performed(id: str, output: TaskOutput) -> Performed | Failed:
    match output.outcome:
        case Answer() as answer:
            return _part(id, answer, is_last=True)
        case error:
            return failed(id, error)


def _part(id: str, answer: Answer, *, is_last: bool) -> Performed:
    headers = dict(answer.headers)
    return Performed(id, answer.body, answer.content_type, answer.code, headers, is_last)
