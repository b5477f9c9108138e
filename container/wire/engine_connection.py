"""A worker's connection to one engine, and a queue per running request.

Uses gevent's primitives explicitly, so it works with and without monkey-patching. All calls must
come from the thread that created the connection.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import gevent
import gevent.event
import msgspec
import zmq.green as zmq

from container.wire.channel import Channel, Clock
from container.wire.engine_state import EngineState, Health, Refusals
from container.wire.receipt_stream import ReceiptStream
from container.wire.reply import Reply
from container.wire.snapshots import SnapshotFeed
from container.wire.token_stream import TokenStream
from core.errors import EngineUnavailableError
from core.output import Output
from core.protocol.messages import (
    Abort,
    AbortReason,
    Charged,
    Dead,
    Failed,
    FromEngine,
    Heartbeat,
    Perform,
    Performed,
    Ready,
    Refused,
    Step,
    Submit,
    ToEngine,
    Variants,
    Watch,
    Watched,
)

logger = logging.getLogger(__name__)

LIVENESS_CHECK_INTERVAL_S = 0.25
"""How long to wait for a message before checking whether the engine is still alive."""
MAX_TURN_S = 0.01
"""For how long messages are read before other greenlets run."""
LOOP_TURN_S = 1e-6
"""To sleep so long lets the event loop look at all sockets. To sleep for 0 s might not."""
FEW_REQUESTS = 32
"""So many requests keep up with the engine, and each of its steps is a chunk of their streams."""
MAX_SILENCE_S = 10.0
"""An engine that has been silent for this long is considered dead; its requests fail."""


class EngineConnection:
    """Submits requests to the engine at `endpoint` and routes its replies to their handlers."""

    def __init__(
        self,
        endpoint: str,
        heartbeat_timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        label: str = "",
    ) -> None:
        """label: tells the engine from others in the log."""
        self.endpoint = endpoint
        self._label = label and f" {label}"
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.stream_delay_s = 0.0
        """How long messages may wait, so that several are read at once. May be set at any time."""
        self._clock = clock
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._open: dict[str, TokenStream | Reply] = {}
        """The running requests by their ids."""
        self._pushed: dict[str, TokenStream | Reply] = {}
        """The requests for which messages have been read but not delivered."""
        self.refusals = Refusals()
        self.snapshots = SnapshotFeed(self._watch, clock)
        self.ready = gevent.event.Event()
        """Set while the engine accepts requests."""
        self.state = EngineState("the engine is starting")
        self._context = zmq.Context()
        self._channel = self._new_channel()
        self._receiver: gevent.Greenlet[[], None] = gevent.spawn(self._receive_forever)

    @property
    def load(self) -> int:
        """The engine's unfinished requests, of this worker and of others."""
        return len(self._open) + self.state.num_of_others

    def health(self) -> Health:
        """Check that the engine is ready, sends heartbeats and completes steps."""
        return self.state.health(self._channel.silence_s, self._heartbeat_timeout_s)

    def submit(self, request: Submit) -> TokenStream:
        """Start a generation, with an id of its own.

        Raises EngineUnavailableError while the engine is not ready.
        """
        id = self._new_id()
        kind = ReceiptStream if self.state.facts.gives_receipts else TokenStream
        stream = kind(id, request.params.num_answers, self.abort)
        self._channel.send(msgspec.structs.replace(request, id=id))
        self._open[id] = stream
        return stream

    def perform(self, body: bytes, headers: Mapping[str, str], variant: str = "") -> Reply:
        """Start a task. Raises EngineUnavailableError while the engine is not ready."""
        return self.request(lambda id: Perform(id, body, dict(headers), variant))

    def request(self, message: Callable[[str], ToEngine]) -> Reply:
        """Send a message that is answered with Performed, made from a new id.

        Raises EngineUnavailableError while the engine is not ready.
        """
        id = self._new_id()
        self._channel.send(message(id))
        reply = self._open[id] = Reply(id, self.abort)
        return reply

    def abort(self, id: str, index: int | None = None, reason: AbortReason = "disconnect") -> None:
        """Abort a running request, or only the answer with this index.

        Drops messages that still arrive for an aborted request.
        """
        request = self._open.get(id)
        if request is None:
            return
        if index is None and not request.awaits_receipt:
            del self._open[id]
        self._channel.send(Abort(id, index, reason))

    def fail_all(self, reason: str) -> None:
        """Fail every running request with `reason`."""
        running, self._open = self._open, {}
        for request in running.values():
            request.push(Failed(request.id, "failed", reason))
            request.deliver()

    def close(self) -> None:
        """Fail the running requests and close the socket."""
        self._receiver.kill()
        self.snapshots.close()
        self.fail_all("the front end is closing")
        self._channel.close()
        self._context.term()

    def _new_id(self) -> str:
        if not self.state.is_ready:
            raise EngineUnavailableError(self.state.down_reason)
        return f"{self._name}-{next(self._numbers)}"

    def _receive_forever(self) -> None:
        while True:
            is_ready = self.state.is_ready
            wait_s = LIVENESS_CHECK_INTERVAL_S if is_ready else self._say_hello()
            message = self._channel.receive(wait_s)  # `_say_hello` may have replaced the channel
            if message is None:
                self._check_alive(is_ready=is_ready)
                continue
            end = self._clock() + MAX_TURN_S
            while message is not None:
                self._dispatch(message)
                # With many requests, streams that are behind get the tokens of several steps.
                may_merge = self.stream_delay_s or len(self._open) > FEW_REQUESTS
                reads_on = may_merge and self._clock() < end
                message = self._channel.receive_now() if reads_on else None
            pushed, self._pushed = self._pushed, {}
            _deliver(pushed.values(), self._clock)
            gevent.sleep(self.stream_delay_s)  # if 0, others run even while more messages wait

    def _check_alive(self, *, is_ready: bool) -> None:
        """Reconnect if the engine is lost. Call it if no message waits, so that the last messages
        of an engine are read first."""
        if self._channel.has_ended:
            self._reconnect("the engine has ended")
        elif is_ready and self._channel.silence_s >= MAX_SILENCE_S:
            self._reconnect(f"no heartbeat from the engine for {MAX_SILENCE_S:.0f} s")

    def _say_hello(self) -> float:
        """Say hello to an engine that is not ready. Return how long to wait for messages."""
        if self._channel.is_worn_out:
            self._channel.close()
            self._channel = self._new_channel()
        return self._channel.say_hello()

    def _reconnect(self, reason: str) -> None:
        """Fail the running requests and wait for a new engine, on a new channel.

        Messages still queued in the old one are stale.
        """
        logger.warning("engine=lost%s reason=%r requests=%d", self._label, reason, len(self._open))
        self.ready.clear()
        self.state = EngineState(reason)
        self._channel.close()
        self._channel = self._new_channel()
        self.fail_all(reason)

    def _new_channel(self) -> Channel:
        return Channel(self._context.socket(zmq.DEALER), self.endpoint, self._clock)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Step(outputs):
                for id, output in outputs:
                    self._pass_on(id, output)
            case Charged(id) | Performed(id) | Failed(id):
                self._pass_on(id, message)
            case Heartbeat():
                self._beat(message)
            case _:
                self._change_state(message)

    def _pass_on(self, id: str, part: Output | Charged | Performed | Failed) -> None:
        request = self._open.get(id)
        if request is None:
            return  # aborted while this message was in flight
        # The engine answers a Submit with outputs, and other requests with Performed.
        request.push(part)  # pyright: ignore[reportArgumentType]
        self._pushed[id] = request
        if request.has_ended:
            del self._open[id]

    def _beat(self, heartbeat: Heartbeat) -> None:
        self.state = self.state.after(heartbeat, len(self._open))
        if refused := self.refusals.take():
            self._channel.send(Refused(refused))

    def _change_state(self, message: FromEngine) -> None:
        match message:
            case Ready(facts, variants):
                self.state = replace(self.state, known_facts=facts, variants=variants)
                self.ready.set()
            case Variants(loaded):
                self.state = replace(self.state, variants=loaded)
            case Watched(snapshot):
                self.snapshots.push(snapshot)
            case Dead(reason):
                self._reconnect(f"the engine has ended: {reason}")
            case _:
                pass

    def _watch(self, seconds: float) -> None:
        if self.state.is_ready:
            self._channel.send(Watch(seconds))


def _deliver(requests: Iterable[TokenStream | Reply], clock: Clock) -> None:
    """Deliver what has been read for each request. Others run every MAX_TURN_S."""
    end = clock() + MAX_TURN_S
    for request in requests:
        request.deliver()
        if clock() >= end:
            gevent.sleep(LOOP_TURN_S)
            end = clock() + MAX_TURN_S
