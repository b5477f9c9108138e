"""The engine's socket. A thread of its own runs it; the server's loop only queues messages."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from core.errors import EngineUnavailableError, LongshoreError
from core.protocol.messages import FromEngine, Heartbeat, Message, NewRequest, ToEngine
from core.protocol.stats import Stats
from engine.serve.stall_timer import StallTimer

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.25
EVERYONE = b""
CLOSE = [EVERYONE, b""]


class ClientGone(Message, frozen=True):
    """A client has disconnected. Never sent over the wire."""


@dataclass(frozen=True, slots=True)
class ConnectionBroken:
    """The engine cannot go on, for example without its socket. Never sent over the wire."""

    error: LongshoreError


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was prepared, or cannot be. Never sent over the wire."""

    message: NewRequest
    arrival: float
    error: BaseException | None
    """Why the request cannot run."""


class Finished:
    """Base class of what threads of a service report to it. Never sent over the wire."""


@dataclass(slots=True)
class Pulse:
    """When the loop was last alive, and its statistics then.

    The loop replaces the whole object, so readers need no lock.
    """

    alive_at: float = field(default_factory=time.monotonic)
    stats: Stats = field(default_factory=Stats)


Inbound = ToEngine | ClientGone | ConnectionBroken | Prepared | Finished


class Connection:
    """A ROUTER socket at `endpoint`. `inbox` yields (client, message); `send` never blocks.

    A context manager: leaving it sends the queued messages and closes the socket.
    """

    def __init__(self, endpoint: str, *, may_sleep: bool = False) -> None:
        """may_sleep: steps run the user's own code. If it waits for something, it is not hung."""
        self.inbox: queue.SimpleQueue[tuple[bytes, Inbound]] = queue.SimpleQueue()
        self.pulse = Pulse()
        self.endpoint = endpoint
        self._stall_timer = None if may_sleep else StallTimer()
        self._context = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    def __enter__(self) -> Connection:
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.sndhwm = 0  # the default, 1000 queued messages, would make `send` block
        self._outbox.bind("inproc://outbox")
        queued = self._context.socket(zmq.PULL)
        queued.rcvhwm = 0
        queued.connect("inproc://outbox")
        router = self._context.socket(zmq.ROUTER)
        # Without this, ZeroMQ silently drops messages to a client that has disconnected.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.sndhwm = 0
        router.linger = 1000
        router.bind(self.endpoint)
        self._thread = threading.Thread(
            target=self._run, args=(router, queued), name="engine-io", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue(CLOSE)
        self._thread.join()
        self._outbox.close()
        self._context.term()

    def send(self, client: bytes, message: FromEngine) -> None:
        """Queue a message for a client. Call from the loop's thread only."""
        self._queue([client, self._encode(message)])

    def broadcast(self, message: FromEngine) -> None:
        """Queue a message for every connected client. Call from the loop's thread only."""
        self.send(EVERYONE, message)

    def _queue(self, frames: list[bytes]) -> None:
        # If the thread has failed, nobody receives messages, and the inbox holds a
        # ConnectionBroken.
        with contextlib.suppress(zmq.Again):
            self._outbox.send_multipart(frames, zmq.NOBLOCK)

    def _run(self, router: zmq.Socket[bytes], queued: zmq.Socket[bytes]) -> None:
        try:
            self._forward(router, queued)
        except Exception as error:
            logger.exception("the engine's socket failed")
            reason = f"the engine's socket failed: {type(error).__name__}: {error}"
            self.inbox.put((EVERYONE, ConnectionBroken(EngineUnavailableError(reason))))
        finally:
            queued.close()
            router.close()

    def _forward(self, router: zmq.Socket[bytes], queued: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(queued, zmq.POLLIN)
        clients: set[bytes] = set()
        next_beat = time.monotonic()
        while True:
            wait_ms = max(0, int((next_beat - time.monotonic()) * 1000))
            ready = dict(poller.poll(wait_ms))
            if router in ready:
                self._receive(router, clients)
            if queued in ready:
                client, payload = frames = queued.recv_multipart()
                if frames == CLOSE:
                    return
                for receiver in (client,) if client != EVERYONE else tuple(clients):
                    self._deliver(router, receiver, payload, clients)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_INTERVAL_S
                beat = self._encode(self._heartbeat())
                for client in tuple(clients):
                    self._deliver(router, client, beat, clients)

    def _receive(self, router: zmq.Socket[bytes], clients: set[bytes]) -> None:
        client, *frames = router.recv_multipart()
        try:
            (payload,) = frames
            message = self._decode(payload)
        except (ValueError, RecursionError, LongshoreError) as error:
            # Raised by msgspec, for a wrong number of frames, or by a parameter class's checks.
            logger.error("client=%s invalid message: %s", client.hex(), error)
            return
        clients.add(client)
        self.inbox.put((client, message))

    def _deliver(
        self, router: zmq.Socket[bytes], client: bytes, payload: bytes, clients: set[bytes]
    ) -> None:
        try:
            router.send_multipart([client, payload])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if client in clients:
                clients.discard(client)
                self.inbox.put((client, ClientGone()))

    def _heartbeat(self) -> Heartbeat:
        pulse, now = self.pulse, time.monotonic()
        age_s = now - pulse.alive_at
        stalled_s = self._stall_timer.seconds(age_s, now) if self._stall_timer else 0.0
        return Heartbeat(age_s, pulse.stats, stalled_s)
