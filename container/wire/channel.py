"""A DEALER socket to an engine, from the first Hello until the engine counts as lost."""

from __future__ import annotations

from collections.abc import Callable

import gevent
import msgspec
import zmq

from core.protocol.messages import FromEngine, Hello, ToEngine

HELLO_INTERVAL_S = 1.0
MAX_UNANSWERED_HELLOS = 60
"""After so many Hellos without an answer the channel is to be replaced, because its socket would
keep every Hello until an engine reads it."""
MAX_PAUSE_S = 0.5
"""The most time that counts as silence between two readings. If more time passes, this process was
held up, and messages that the engine sent meanwhile may still be on their way."""

Clock = Callable[[], float]


class Channel:
    """Sends messages to an engine and receives its messages. Serves one engine process."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, clock: Clock) -> None:
        """socket: a DEALER socket of zmq.green. The channel connects and closes it."""
        self._clock = clock
        self._silence = Silence(clock)
        self._hello_due = clock()
        self._num_hellos = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self._socket = socket
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        # NOTE: do not set `immediate`: on a disconnect it drops received messages, such as Dead.
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)

    @property
    def silence_s(self) -> float:
        """For how long the engine has sent nothing."""
        return self._silence.seconds

    @property
    def has_ended(self) -> bool:
        """Whether the engine has closed the connection. Messages may still wait to be received."""
        return bool(self._monitor.poll(0))

    @property
    def is_worn_out(self) -> bool:
        """Whether the channel must be replaced before the next Hello."""
        return self._num_hellos == MAX_UNANSWERED_HELLOS and self._clock() >= self._hello_due

    def say_hello(self) -> float:
        """Send Hello if one is due. Return how many seconds remain until the next one."""
        if self._clock() >= self._hello_due:
            self._num_hellos += 1
            self.send(Hello())
            self._hello_due = self._clock() + HELLO_INTERVAL_S
        return max(0.0, self._hello_due - self._clock())

    def send(self, message: ToEngine) -> None:
        self._socket.send(self._encoder.encode(message))  # pyright: ignore[reportUnknownMemberType]

    def receive(self, timeout_s: float) -> FromEngine | None:
        """Return the next message, or None if none arrives within `timeout_s`."""
        return self._decoded(self._receive(timeout_s))

    def receive_now(self) -> FromEngine | None:
        """Return the next message if it has arrived. No other greenlet runs meanwhile."""
        return self._decoded(self._receive_now())

    def _decoded(self, frame: bytes | None) -> FromEngine | None:
        if frame is None:
            self._silence.listened()
            return None
        self._silence.heard()
        return self._decoder.decode(frame)

    def close(self) -> None:
        """Close the socket. Messages that wait in it are dropped."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _receive(self, timeout_s: float) -> bytes | None:
        # NOTE: zmq.green's poll misses messages that arrive while another greenlet sends, because
        # sending consumes the edge-triggered event of the socket's file descriptor. recv does not.
        frame = self._receive_now()
        if frame is not None:
            return frame
        with gevent.Timeout(timeout_s, False):  # pyright: ignore[reportArgumentType]
            return self._socket.recv()
        # If the event loop was held up, the time is over but messages may have arrived.
        return self._receive_now()

    def _receive_now(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None


class Silence:
    """How long the engine has been silent, counted only while its messages could be read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.heard()

    def heard(self) -> None:
        """Start again at zero: a message has been read."""
        self.seconds = 0.0
        self._read_at = self._clock()

    def listened(self) -> None:
        """Count the time since the last reading: no message waits to be read."""
        now = self._clock()
        self.seconds += min(now - self._read_at, MAX_PAUSE_S)
        self._read_at = now
