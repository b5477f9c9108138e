"""Lets the supervisor wait until the engine is ready."""

from __future__ import annotations

import time

import msgspec
import zmq

from core.protocol.facts import Facts
from core.protocol.messages import FromEngine, Hello, Ready

_HELLO_INTERVAL_S = 1.0


class ReadinessWatch:
    """Sends Hello to an engine until it answers with Ready.

    Close the watch when the engine is ready or has died.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._hello_due = 0.0
        self._hello = msgspec.msgpack.encode(Hello())
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)

    def wait(self, timeout_s: float) -> Facts | None:
        """Wait at most `timeout_s`. Return the engine's facts if it is ready, else None."""
        if time.monotonic() >= self._hello_due:
            self._hello_due = time.monotonic() + _HELLO_INTERVAL_S
            self._socket.send(self._hello)
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        message = self._decoder.decode(self._socket.recv())
        return message.facts if isinstance(message, Ready) else None

    def close(self) -> None:
        self._socket.close()
