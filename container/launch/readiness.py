"""The supervisor's view of the engine: whether it has said Ready yet, and with what facts."""

from __future__ import annotations

import time

import msgspec
import zmq

from core.messages import Facts, FromEngine, Hello, Ready

_HELLO_INTERVAL_S = 1.0


class ReadinessWatch:
    """Says hello to one engine until it is ready. Close it then, or when the engine has died."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._hello_due = 0.0
        self._hello = msgspec.msgpack.encode(Hello())
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)

    def wait(self, timeout_s: float) -> Facts | None:
        """Waits that long at most; the facts once the engine is ready."""
        if time.monotonic() >= self._hello_due:
            self._hello_due = time.monotonic() + _HELLO_INTERVAL_S
            self._socket.send(self._hello)
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        message = self._decoder.decode(self._socket.recv())
        return message.facts if isinstance(message, Ready) else None

    def close(self) -> None:
        self._socket.close()
