"""A fake engine: answers any number of requests at a given pace, and computes nothing.

`python -m benchmarks.front_end.engine ENDPOINT MODEL_DIR`

A request names the pace of its answer: its `seed` is the number of microseconds between steps. All
requests of a measurement name the same.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from core.output import Output
from core.process.internal_arguments import internal_arguments
from core.process.processes import die_with_parent
from core.protocol.facts import Facts
from core.protocol.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Hello,
    Ready,
    Step,
    Submit,
    ToEngine,
)
from core.protocol.stats import Stats
from core.sampling import Finish
from core.text.tokenizer import Tokenizer

HEARTBEAT_S = 0.25
TEXT = (
    " The quick brown fox jumps over the lazy dog, and nobody in the café is surprised: it has "
    "done so every morning since 1885. “Again?” asks the dog, and turns to the other side.\n"
)
FACTS = Facts(
    model="fake",
    architecture="Fake",
    batching="paged",
    batching_reason="a benchmark",
    executor="packed",
    executor_reason="a benchmark",
    device="cpu",
    dtype="float32",
    max_model_len=2**15,
    max_sequences=2**14,
    weights_bytes=0,
    kv_bytes=0,
    vocab_size=2**20,
    load_seconds=0.0,
)


@dataclass(slots=True)
class Running:
    """A request that is being answered."""

    client: bytes
    id: str
    num_left: int
    num_sent: int = 0


class FakeEngine:
    """Answers with the tokens of TEXT, over and over, each request to its `max_tokens`."""

    def __init__(self, socket: zmq.Socket[bytes], token_ids: list[int]) -> None:
        self._socket = socket
        self._token_ids = token_ids
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._clients: set[bytes] = set()
        self._running: dict[str, Running] = {}
        self._step_s = 0.0
        self._step_due = math.inf
        self._beat_due = 0.0

    def run(self) -> None:
        """Answer until the process ends."""
        while True:
            wait_s = min(self._step_due, self._beat_due) - time.monotonic()
            if self._socket.poll(max(0, math.ceil(wait_s * 1000))):
                client, data = self._socket.recv_multipart()
                self._receive(client, self._decode(data))
            now = time.monotonic()
            if now >= self._beat_due:
                self._beat_due = now + HEARTBEAT_S
                for client in self._clients:
                    self._send(client, Heartbeat(0.0, Stats(num_running=len(self._running))))
            if now >= self._step_due:
                self._step(now)
                self._step_due = self._step_due + self._step_s if self._running else math.inf

    def _receive(self, client: bytes, message: ToEngine) -> None:
        match message:
            case Hello():
                self._clients.add(client)
                self._send(client, Ready(FACTS))
            case Submit(id=id, params=params):
                self._step_s = (params.seed or 0) / 1e6
                if not self._running:
                    self._step_due = time.monotonic() + self._step_s
                self._running[id] = Running(client, id, params.max_tokens)
            case Abort(id):
                self._running.pop(id, None)
            case _:
                pass

    def _step(self, now: float) -> None:
        """Send a token of each running request: one message to each client."""
        outputs: dict[bytes, list[tuple[str, Output]]] = defaultdict(list)
        for request in [*self._running.values()]:
            outputs[request.client].append((request.id, self._output(request, now)))
            if not request.num_left:
                del self._running[request.id]
        for client, of_client in outputs.items():
            self._send(client, Step(of_client))

    def _output(self, request: Running, now: float) -> Output:
        token_id = self._token_ids[request.num_sent % len(self._token_ids)]
        request.num_sent += 1
        request.num_left -= 1
        finish = None if request.num_left else Finish.LENGTH
        return Output(0, (token_id,), (-0.5,), finish, admitted=now)

    def _send(self, client: bytes, message: FromEngine) -> None:
        self._socket.send_multipart([client, self._encode(message)])


def text_tokens(model_dir: Path) -> list[int]:
    """Return the tokens of TEXT, which answers repeat."""
    return Tokenizer(model_dir).encode(TEXT, add_special_tokens=False)


def main(endpoint: str, model_dir: str) -> None:
    """Answer until the process that started this one ends."""
    die_with_parent(os.getppid())
    token_ids = text_tokens(Path(model_dir))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.bind(endpoint)
        FakeEngine(socket, token_ids).run()


if __name__ == "__main__":
    description = "A fake engine. `python -m benchmarks.front_end` starts it."
    form = "ENDPOINT MODEL_DIR"
    main(*internal_arguments("benchmarks.front_end.engine", description, form))
