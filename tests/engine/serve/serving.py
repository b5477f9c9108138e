"""For tests of the server: a client, and an executor that blocks or fails."""

from __future__ import annotations

import threading
import time

import msgspec
import zmq

from core.errors import StoppedError
from core.protocol.facts import Facts
from core.protocol.messages import FromEngine, Step
from core.sampling import SamplingParams
from tests.strategies.fakes import FakeExecutor, next_token

FACTS = Facts(
    model="tiny", architecture="Tiny", batching="paged", batching_reason="", executor="packed",
    executor_reason="", device="cpu", dtype="float32", kv_dtype="float32", max_model_len=48,
    max_sequences=4, max_step_tokens=16, block_size=4, num_kv_blocks=64, weights_bytes=0,
    kv_bytes=0, vocab_size=23, eos_token_ids=(0,), load_seconds=0.0,
)  # fmt: skip


class Client:
    """A minimal front end."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.decoder = msgspec.msgpack.Decoder(FromEngine)

    def send(self, message):
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self, kind, timeout_s=60):
        """Return the next message of this kind, skipping others."""
        deadline = time.monotonic() + timeout_s
        while True:
            assert time.monotonic() < deadline, f"no {kind} came"
            assert self.socket.poll(1000 * timeout_s), "no message came at all"
            message = self.decoder.decode(self.socket.recv())
            if isinstance(message, kind):
                return message

    def answer(self, id):
        """Return all tokens of a request and its finish reason."""
        tokens = []
        while True:
            for request_id, output in self.receive(Step).outputs:
                if request_id == id:
                    tokens += output.token_ids
                    if output.finish is not None:
                        return tokens, output.finish

    def close(self):
        self.socket.close()
        self.context.term()


class Gate:
    """An executor that blocks while closed and raises on demand."""

    def __init__(self):
        self.executor = FakeExecutor(4)
        self.open = threading.Event()
        self.open.set()
        self.error = None

    def submit(self, plan, between_tokens):
        self.open.wait(60)
        if self.error is not None:
            raise self.error
        return self.executor.submit(plan, between_tokens)


class Stop(StoppedError):
    """Raised in a step to end the server's thread."""


def greedy(max_tokens=5):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def expected(sequence_id, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(sequence_id, tokens))
    return tokens[len(prompt) :]


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
