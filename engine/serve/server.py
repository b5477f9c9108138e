"""The main loop of the engine process: handles messages, runs steps and sends the outputs."""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import msgspec

from core.errors import LongshoreError, OverloadedError, RequestError
from core.foreign_code import contained
from core.output import Output
from core.protocol.messages import (
    Abort,
    Charged,
    Failed,
    FromEngine,
    Hello,
    NewRequest,
    Refused,
    Step,
    Watch,
)
from core.sampling import Finish
from engine.serve.connection import (
    ClientGone,
    Connection,
    ConnectionBroken,
    Inbound,
    Prepared,
)
from engine.serve.emf import EmfReporter
from engine.serve.heart import Heart
from engine.serve.host_time import HostTime
from engine.serve.meter import WORKER_LOST, Meter, RequestProgress
from engine.serve.open_requests import ClientRequest, OpenRequests
from engine.serve.service import Result, Service
from engine.serve.watchers import MIN_INTERVAL_S, Watchers

logger = logging.getLogger(__name__)

IDLE_PULSE_S = 0.5
"""Longest wait for a message, so that the pulse stays fresh while nothing runs."""


class Server:
    """Runs the engine of a service for the clients of a connection, in the caller's thread."""

    def __init__(
        self,
        service: Service,
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
        self._service = service
        self._engine = service.engine
        self._connection = connection
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._requests = OpenRequests()
        self._held: dict[tuple[bytes, str], NewRequest] = {}
        """Requests that are being prepared, by client and the client's id."""
        self._meter = Meter()
        self._host_time = HostTime(self._engine.model_time)
        self._heart = Heart(self._engine, connection, self._meter, self._host_time)
        self._watchers = Watchers(
            self._engine.strategy, connection.send, self._requests.first_token
        )
        self._reporter = reporter

    def serve_forever(self) -> None:
        """Serve until an error ends the engine, and raise it."""
        while True:
            self._receive(self._idle_seconds())
            num_before = self._engine.num_step_tokens
            outputs = self._engine.advance(time.monotonic(), self._between_tokens)
            if num_tokens := self._engine.num_step_tokens - num_before:
                self._meter.record_step(num_tokens)
            messages = self._messages_of(outputs)
            # Before the messages: a client that gets its last token finds it counted in /metrics.
            self._report()
            for client, message in messages:
                self._connection.send(client, message)

    def _between_tokens(self) -> None:
        """Handle messages, above all aborts, within a step that generates whole answers."""
        self._receive(0)
        self._report()

    def _report(self) -> None:
        """Tell everyone who wants to know how the engine is."""
        now = time.monotonic()
        stats = self._heart.beat(now)
        if self._reporter is not None:
            self._reporter.tick(self._engine.facts, stats, now)
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
                self._connection.send(client, self._service.ready())
            case NewRequest():
                self._submit(client, message, time.monotonic(), is_new=True)
            case Prepared():
                self._take_prepared(client, message)
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
            case _:
                self._service.handle(client, message)

    def _take_prepared(self, client: bytes, prepared: Prepared) -> None:
        message = prepared.message
        if self._held.pop((client, message.id), None) is None:
            return  # aborted meanwhile
        if prepared.error is None:
            self._submit(client, message, prepared.arrival)
        else:
            self._connection.send(client, Failed.of(message.id, prepared.error))

    def _submit(
        self, client: bytes, message: NewRequest, arrival: float, *, is_new: bool = False
    ) -> None:
        """Add a request to the engine once it is prepared, or answer with Failed.

        is_new: whether a full queue may refuse it. False for one that has been prepared.
        """
        try:
            with contained:
                self._add(client, message, arrival, is_new=is_new)
        except Exception as error:  # whatever goes wrong belongs to this request alone
            if not isinstance(error, LongshoreError):
                logger.exception("request not added id=%s", message.id)
            self._connection.send(client, Failed.of(message.id, error))

    def _add(self, client: bytes, message: NewRequest, arrival: float, *, is_new: bool) -> None:
        key = client, message.id
        if key in self._requests.ids or key in self._held:
            raise RequestError("id", "this id is in use")
        if is_new:
            self._check_queue(message)
        if self._service.prepares(client, message, arrival):
            self._held[key] = message
            return
        progress = RequestProgress.of(message, arrival)
        send = partial(self._send_part, client, message.id)
        self._requests.add(self._service.add(message, arrival, send), client, message.id, progress)

    def _send_part(self, client: bytes, id: str, part: FromEngine) -> bool:
        """Send a part of an answer. Return False if the request was aborted.

        Called within a step, which lasts until the answer is complete. Handles waiting messages
        first, since the client may have disconnected.
        """
        self._between_tokens()
        if (client, id) not in self._requests.ids:
            return False
        self._connection.send(client, part)
        return True

    def _check_queue(self, message: NewRequest) -> None:
        """Raise OverloadedError if the request does not fit into the queue.

        The queue holds `max_waiting` requests beyond those that fit into a batch. Their prompts may
        have `max_waiting_tokens` tokens; a single request may have any number.
        """
        strategy = self._engine.strategy
        num_held = len(strategy.waiting) + len(strategy.running) + len(self._held)
        if num_held >= self._max_waiting + strategy.limits.max_sequences:
            raise OverloadedError(
                f"{self._max_waiting} requests are waiting already (job_queue_size)"
            )
        num_tokens = message.num_queued_tokens
        if self._max_waiting_tokens is None or not num_tokens:
            return
        held = sum(request.num_queued_tokens for request in self._held.values())
        waiting = strategy.num_waiting_tokens + held
        if waiting and waiting + num_tokens > self._max_waiting_tokens:
            raise OverloadedError(
                f"{waiting} prompt tokens are waiting already, and {num_tokens} more would exceed "
                f"{self._max_waiting_tokens} (option.job_queue_tokens)"
            )

    def _abort_all(self, client: bytes) -> None:
        for owner, id in (*self._requests.ids, *self._held):
            if owner == client:
                self._abort(owner, id, None, WORKER_LOST)

    def _abort(self, client: bytes, id: str, index: int | None, reason: str) -> None:
        now = time.monotonic()
        held = self._held.pop((client, id), None)
        if held is not None:
            progress = RequestProgress.of(held, now)
            self._meter.record_abort(progress, range(progress.num_answers), reason, now)
        request_id = self._requests.ids.get((client, id))
        if request_id is None:
            return
        request = self._requests[request_id]
        open_before = frozenset(request.open_answers)
        self._requests.close(request_id, index)
        ended = open_before - request.open_answers
        timings = self._meter.record_abort(request.progress, ended, reason, now)
        for answer, timing in timings.items():
            self._watchers.note_end(request_id + answer, timing)
        answer = index if request.open_answers else None
        receipt = self._engine.abort(request_id, answer, reason)
        if receipt is not None and reason == "stop_string":
            self._connection.send(client, Charged(id, receipt))

    def _messages_of(self, outputs: Sequence[Output | Result]) -> list[tuple[bytes, FromEngine]]:
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
            if not isinstance(output, Output):
                self._meter.record_result(request.progress, output, now)
                messages.append((request.client, output.message(request.id)))
                self._requests.close(output.request_id)
            elif output.finish == Finish.ERROR:
                self._meter.record(request.progress, output, now)
                kind = "rejected" if output.failed_field else "failed"
                failure = Failed(request.id, kind, output.failure, output.failed_field)
                messages.append((request.client, failure))
                self._requests.close(output.request_id)
            elif output.index in request.open_answers:
                steps[request.client].append((request.id, self._delivered(request, output, now)))
        messages += ((client, Step(outputs)) for client, outputs in steps.items())
        return messages

    def _delivered(self, request: ClientRequest, output: Output, now: float) -> Output:
        """Count an answer's new tokens. Return them, at the answer's end with its timing."""
        timing = self._meter.record(request.progress, output, now)
        if timing is not None:
            output = msgspec.structs.replace(output, timing=timing)
            self._watchers.note_end(output.request_id + output.index, timing)
        if output.finish is not None:
            self._requests.close(output.request_id, output.index)
        return output
