"""The engine's socket, in a thread of its own: the step loop only sees two queues."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from core.messages import FromEngine, Heartbeat, Message, Submit, ToEngine
from core.stats import Stats
from engine.lora.files import AdapterWeights

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.25
EVERYONE = b""
CLOSE = [EVERYONE, b""]


class ClientGone(Message, frozen=True):
    """A client's socket has gone; never on the wire."""


class Broken(Message, frozen=True):
    """The socket's thread has ended; never on the wire."""

    reason: str


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """What reading the files of a LoadAdapter came to; never on the wire."""

    id: str
    name: str
    src: str
    outcome: AdapterWeights | Exception


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose grammar has been compiled meanwhile; never on the wire."""

    message: Submit
    arrival: float
    error: BaseException | None
    """Why it could not be."""


@dataclass(slots=True)
class Pulse:
    """What the loop last said of itself. Replaced whole, so no lock is needed."""

    at: float = field(default_factory=time.monotonic)
    stats: Stats = field(default_factory=Stats)


Inbound = ToEngine | ClientGone | Broken | AdapterRead | Compiled


class Connection:
    """A ROUTER socket at `endpoint`. `inbox` yields (client, message); `send` never blocks.

    Use as a context manager; leaving it sends what is queued and closes the socket.
    """

    def __init__(self, endpoint: str) -> None:
        self.inbox: queue.SimpleQueue[tuple[bytes, Inbound]] = queue.SimpleQueue()
        self.pulse = Pulse()
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode

    def __enter__(self) -> Connection:
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.sndhwm = 0  # else `send` would wait once a thousand messages do
        self._outbox.bind("inproc://outbox")
        queued = self._context.socket(zmq.PULL)
        queued.rcvhwm = 0
        queued.connect("inproc://outbox")
        router = self._context.socket(zmq.ROUTER)
        # Without this a message to a client that has gone vanishes unseen.
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
        """Queues a message. From the loop's thread only."""
        self._queue([client, self._encode(message)])

    def broadcast(self, message: FromEngine) -> None:
        """Queues a message to every client that has ever said anything. From one thread only."""
        self.send(EVERYONE, message)

    def _queue(self, frames: list[bytes]) -> None:
        # Nobody takes it once the thread has ended, which the inbox then says.
        with contextlib.suppress(zmq.Again):
            self._outbox.send_multipart(frames, zmq.NOBLOCK)

    def _run(self, router: zmq.Socket[bytes], queued: zmq.Socket[bytes]) -> None:
        try:
            self._forward(router, queued)
        except Exception as error:
            logger.exception("the engine's socket is lost")
            self.inbox.put((EVERYONE, Broken(f"{type(error).__name__}: {error}")))
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
                for each in (client,) if client != EVERYONE else tuple(clients):
                    self._deliver(router, each, payload, clients)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_INTERVAL_S
                beat = self._encode(self._heartbeat())
                for each in tuple(clients):
                    self._deliver(router, each, beat, clients)

    def _receive(self, router: zmq.Socket[bytes], clients: set[bytes]) -> None:
        client, *frames = router.recv_multipart()
        try:
            (payload,) = frames
            message = self._decode(payload)
        except ValueError as error:  # of msgspec, or a wrong number of frames
            logger.error("client=%s message without meaning: %s", client.hex(), error)
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
        pulse = self.pulse
        return Heartbeat(time.monotonic() - pulse.at, pulse.stats)
