"""A fake engine without a model: speaks core.protocol.messages over a ROUTER socket and follows a
script.

It runs as a thread in a test (`FakeEngine`), or as a process in place of `python -m engine`:
`python -m tests.container.fake_engine MODE PARENT LAUNCH_JSON COPY`.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from container.front_end.start import read_launch
from core.output import Output
from core.process.processes import die_with_parent
from core.protocol.facts import Facts
from core.protocol.messages import (
    Abort,
    Charged,
    Dead,
    Failed,
    FromEngine,
    Heartbeat,
    Hello,
    LoadAdapter,
    Perform,
    Performed,
    Ready,
    Step,
    Submit,
    ToEngine,
    UnloadAdapter,
    Variant,
    Variants,
)
from core.protocol.stats import Receipt, Stats
from core.sampling import Finish, TopLogprobs

FACTS = Facts(
    model="fake",
    architecture="Fake",
    batching="paged",
    batching_reason="a test",
    executor="packed",
    executor_reason="a test",
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    max_model_len=100,
    max_sequences=8,
    max_step_tokens=64,
    block_size=16,
    num_kv_blocks=40,
    weights_bytes=2**20,
    kv_bytes=2**21,
    digest="1f2e.plain",
    vocab_size=257,
    eos_token_ids=(256,),
    load_seconds=0.1,
    notes=("a note",),
)

Answer = Iterator[FromEngine]
Script = Callable[[Any], Answer]
"""Returns the engine's messages for a Submit or a Perform."""


def says(token_ids: list[int], *others: list[int], per_step: int = 1) -> Script:
    """A script that answers every request with these tokens, up to max_tokens.

    If several answers are requested, `others` are the answers after the first. If there are too
    few, the last one repeats.
    """

    def script(submit: Submit) -> Answer:
        params, texts = submit.params, [token_ids, *others]
        answers = [
            tuple(texts[min(index, len(others))][: params.max_tokens])
            for index in range(params.num_answers)
        ]
        for start in range(0, max(map(len, answers)), per_step):
            step = Step(
                [
                    (submit.id, _output(submit, index, ids, start, start + per_step))
                    for index, ids in enumerate(answers)
                    if start < len(ids)
                ]
            )
            yield step

    return script


def _output(submit: Submit, index: int, ids: tuple[int, ...], start: int, end: int) -> Output:
    params, part = submit.params, ids[start:end]
    finish = Finish.EOS if ids[-1] in FACTS.eos_token_ids else Finish.LENGTH
    scores: tuple[TopLogprobs, ...] = ()
    if start == index == 0 and params.prompt_logprobs is not None:
        scores = tuple(
            _top(prompt_token_id, params.prompt_logprobs)
            for prompt_token_id in submit.prompt_token_ids[1:]
        )
    return Output(
        0,
        part,
        (-0.5 * (index + 1),) * len(part),
        finish if end >= len(ids) else None,
        index,
        top_logprobs=()
        if params.logprobs is None
        else tuple(_top(token_id, params.logprobs) for token_id in part),
        prompt_logprobs=scores,
    )


def _top(token_id: int, width: int) -> TopLogprobs:
    """Return logprobs in which `token_id - 2` and `token_id - 1` are likelier than `token_id`."""
    likely = (token_id - 2, token_id - 1, token_id)[:width]
    return TopLogprobs(-0.5, 3, likely, (-0.1, -0.2, -0.5)[:width])


def fails(kind: str, message: str, field: str = "", after: list[int] | None = None) -> Script:
    """A script that answers with the tokens `after` and then fails the request."""

    def script(submit: Submit) -> Answer:
        for token_id in after or []:
            yield Step([(submit.id, Output(0, (token_id,), (-0.5,)))])
        yield Failed(submit.id, kind, message, field)  # pyright: ignore[reportArgumentType]

    return script


def stalls(after: list[int] | None = None) -> Script:
    """A script that answers with the tokens `after` and never finishes the request."""

    def script(submit: Submit) -> Answer:
        for token_id in after or []:
            yield Step([(submit.id, Output(0, (token_id,), (-0.5,)))])

    return script


def performs(answer: Callable[[Perform], Performed | Failed]) -> Script:
    """A script that answers every task with `answer`."""

    def script(perform: Perform) -> Answer:
        yield answer(perform)

    return script


class FakeEngine:
    """Answers by `script`, which may be replaced between requests, and keeps received messages."""

    def __init__(
        self, endpoint: str, script: Script, *, facts: Facts = FACTS, ready: bool = True
    ) -> None:
        self.script = script
        self.facts = facts
        self.ready = ready
        self.step_age_s = 0.0
        self.stalled_s = 0.0
        self.stats = Stats()
        self.receipt: Receipt | None = None
        """Answers every Abort."""
        self.heartbeats = True
        self.adapters: dict[str, Variant] = {}
        self.max_loras = 2
        self.received: list[ToEngine] = []
        self.endpoint = endpoint
        self._clients: set[bytes] = set()
        self._commands: queue.SimpleQueue[Callable[[zmq.Socket[bytes]], None] | None] = (
            queue.SimpleQueue()
        )
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(60)

    @property
    def num_clients(self) -> int:
        """The number of front-end workers that have connected."""
        return len(self._clients)

    def of_type(self, kind: type[ToEngine]) -> list[ToEngine]:
        """Return all messages of a type received so far."""
        return [message for message in list(self.received) if isinstance(message, kind)]

    def send(self, message: FromEngine) -> None:
        """Send a message to every client whose Hello was answered with Ready."""
        data = msgspec.msgpack.encode(message)

        def command(socket: zmq.Socket[bytes]) -> None:
            for client in self._clients:
                socket.send_multipart([client, data])

        self._commands.put(command)

    def die(self, reason: str = "out of memory") -> None:
        """Send Dead and stop."""
        self.send(Dead(reason))
        self.close()

    def close(self) -> None:
        """Stop without a message. May be called again."""
        self._commands.put(None)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 200
            socket.bind(self.endpoint)
            self._bound.set()
            beat_due = 0.0
            while True:
                if socket.poll(5):
                    client, data = socket.recv_multipart()
                    self._receive(socket, client, data)
                if not self._obey(socket):
                    return
                if self.heartbeats and time.monotonic() > beat_due:
                    beat_due = time.monotonic() + 0.05
                    self.send(Heartbeat(self.step_age_s, self.stats, self.stalled_s))

    def _receive(self, socket: zmq.Socket[bytes], client: bytes, data: bytes) -> None:
        message = msgspec.msgpack.decode(data, type=ToEngine)
        self.received.append(message)
        if isinstance(message, Hello) and self.ready:
            self._clients.add(client)
            ready = Ready(self.facts, tuple(self.adapters.values()))
            socket.send_multipart([client, msgspec.msgpack.encode(ready)])
        if isinstance(message, LoadAdapter | UnloadAdapter):
            answers = self._about_adapters(message)
        elif isinstance(message, Submit | Perform) and message.variant not in ("", *self.adapters):
            answers = iter([Failed(message.id, "not_found", f"no adapter '{message.variant}'")])
        elif isinstance(message, Submit | Perform):
            answers = self.script(message)
        elif isinstance(message, Abort) and self.receipt is not None:
            answers = iter([Charged(message.id, self.receipt)])
        else:
            return
        for answer in answers:
            socket.send_multipart([client, msgspec.msgpack.encode(answer)])

    def _about_adapters(self, message: LoadAdapter | UnloadAdapter) -> Answer:
        """Load or unload an adapter by the rules of the real engine's registry."""
        name, is_load = message.name, isinstance(message, LoadAdapter)
        if is_load == (name in self.adapters):
            yield Failed(message.id, "conflict" if is_load else "not_found", f"adapter '{name}'")
            return
        if is_load and len(self.adapters) == self.max_loras:
            yield Failed(message.id, "no_room", "option.max_loras is 2")
            return
        if isinstance(message, LoadAdapter):
            self.adapters[name] = Variant(name, message.src)
        else:
            del self.adapters[name]
        yield Variants(tuple(self.adapters.values()))
        yield Performed(message.id)

    def _obey(self, socket: zmq.Socket[bytes]) -> bool:
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command(socket)
        return True


def last_performed(engine: FakeEngine) -> Perform:
    """Return the last Perform message."""
    message = engine.of_type(Perform)[-1]
    assert isinstance(message, Perform)
    return message


def _refuses(mode: str, run_dir: Path) -> bool:
    """Return whether to exit with status 2, as an engine does after a configuration error.

    It exits at every start in mode `refuse`, and at the second start in run_dir in `refuse-second`.
    """
    starts = run_dir / "starts"
    with starts.open("a") as file:
        file.write("+")
    return mode == "refuse" or (mode == "refuse-second" and starts.stat().st_size == 2)


def _crashes(mode: str, run_dir: Path) -> bool:
    """Return whether to crash.

    It crashes at every start in mode `crash`, and at the first start in run_dir in `crash-once`.
    """
    marker = run_dir / "crashed"
    if mode == "crash" or (mode == "crash-once" and not marker.exists()):
        marker.touch()
        return True
    return False


def main(mode: str, parent: int, launch_path: str, copy: int) -> None:
    """Run until SIGTERM.

    mode: well, stalls, crash, crash-once, refuse, refuse-second or never-ready. If `-1` is at the
    end, only copy 1 has this mode, and the other copies have the mode `well`.
    """
    mode, is_of_one, _ = mode.partition("-1")
    mode = "well" if is_of_one and copy != 1 else mode
    die_with_parent(parent)
    tempfile.mkdtemp()  # never removed here: the supervisor must remove it
    launch = read_launch(Path(launch_path))
    if _crashes(mode, Path(launch_path).parent):
        os.kill(os.getpid(), signal.SIGKILL)
    if _refuses(mode, Path(launch_path).parent):
        sys.exit(2)
    script = stalls(after=[72]) if mode == "stalls" else says([72, 105])
    engine = FakeEngine(launch.endpoints[copy], script, ready=mode != "never-ready")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
