"""The front end's end of the wire: one DEALER socket, one queue for every running request.

Works with gevent's primitives alone, so it neither needs nor minds monkey-patching. Everything
here runs in the thread that made the client.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import gevent
import msgspec
import zmq.green as zmq

from container.wire.task_reply import TaskReply
from container.wire.token_stream import TokenStream
from core.adapter import Adapter
from core.errors import EngineUnavailableError
from core.messages import (
    Abort,
    Adapters,
    Dead,
    Facts,
    Failed,
    FromEngine,
    Generated,
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
)
from core.sampling import SamplingParams
from core.stats import Stats

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 1.0
LOOK_INTERVAL_S = 0.25
"""How soon the end of an engine that said nothing is noticed."""
MAX_SILENCE_S = 10.0
"""An engine whose heartbeats stay away for longer counts as dead."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests would be answered now, and if not why."""

    healthy: bool
    reason: str


class EngineClient:
    """Submits requests to the engine at `endpoint` and hands back its answers."""

    def __init__(
        self, endpoint: str, heartbeat_timeout_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._endpoint = endpoint
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._clock = clock
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._streams: dict[str, TokenStream] = {}
        self._replies: dict[str, TaskReply] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self._context = zmq.Context()
        self._connect()
        self._down_reason = "the engine is starting"
        self._receiver: gevent.Greenlet[[], None] = gevent.spawn(self._receive_forever)

    @property
    def facts(self) -> Facts:
        """What the engine resolved. Raises EngineUnavailableError while it is not ready."""
        if self._facts is None:
            raise EngineUnavailableError(self._down_reason)
        return self._facts

    @property
    def stats(self) -> Stats:
        """What the engine last said of itself, at most a heartbeat ago while it is healthy."""
        return self._stats

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that are loaded, as the engine last said; none while it is not ready."""
        return self._adapters

    def health(self) -> Health:
        """Healthy means that the engine was ready, is heard of, and moves."""
        if self._facts is None:
            return Health(False, self._down_reason)
        silence = self._clock() - self._last_heard
        if silence >= MAX_SILENCE_S:
            return Health(False, f"no heartbeat of the engine for {silence:.0f} s")
        age = self._step_age_s
        if age >= self._heartbeat_timeout_s:
            return Health(False, f"the engine is stuck: no step ended for {age:.0f} s")
        return Health(True, "")

    def submit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, adapter: str = ""
    ) -> TokenStream:
        """Starts a request. Raises EngineUnavailableError where nobody would answer."""
        stream = TokenStream(self._new_id(), params.num_answers, self.abort)
        self._send(Submit(stream.id, list(prompt_token_ids), params, adapter))
        self._streams[stream.id] = stream
        return stream

    def perform(self, body: bytes, headers: Mapping[str, str]) -> TaskReply:
        """Starts a request of a task. Raises EngineUnavailableError where nobody would answer."""
        return self._ask(Perform(self._new_id(), body, dict(headers)))

    def load_adapter(self, name: str, src: str) -> TaskReply:
        """Has an adapter loaded; likewise."""
        return self._ask(LoadAdapter(self._new_id(), name, src))

    def unload_adapter(self, name: str) -> TaskReply:
        """Has it unloaded; likewise."""
        return self._ask(UnloadAdapter(self._new_id(), name))

    def forget(self, id: str) -> None:
        """Aborts a request of a task, unless it has its answer."""
        if self._replies.pop(id, None) is not None:
            self._send(Abort(id))

    def abort(self, id: str, index: int | None = None) -> None:
        """Aborts a running request, of which nothing more is handed on, or one answer of it."""
        if id not in self._streams:
            return
        if index is None:
            del self._streams[id]
        self._send(Abort(id, index))

    def fail_all(self, reason: str) -> None:
        """Ends every running request with a failure that says `reason`."""
        running = [*self._streams.values(), *self._replies.values()]
        self._streams.clear()
        self._replies.clear()
        for each in running:
            each.push(Failed(each.id, "failed", reason))

    def _ask(self, message: Perform | LoadAdapter | UnloadAdapter) -> TaskReply:
        reply = TaskReply(message.id, self.forget)
        self._send(message)
        self._replies[reply.id] = reply
        return reply

    @property
    def _num_running(self) -> int:
        return len(self._streams) + len(self._replies)

    def _new_id(self) -> str:
        if self._facts is None:
            raise EngineUnavailableError(self._down_reason)
        return f"{self._name}-{next(self._numbers)}"

    def close(self) -> None:
        """Fails what still runs and closes the socket."""
        self._receiver.kill()
        self.fail_all("the front end is closing")
        self._disconnect()
        self._context.term()

    def _connect(self) -> None:
        self._facts: Facts | None = None
        self._adapters: tuple[Adapter, ...] = ()
        self._step_age_s = 0.0
        self._stats = Stats()
        self._last_heard = self._clock()
        self._hello_due = self._clock()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        # NOTE: not `immediate`, which on a disconnect drops what was received, such as Dead.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._endpoint)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _lost(self, reason: str) -> None:
        """Back to the beginning, with a new socket: what the old one still holds is stale."""
        logger.warning("engine=lost reason=%r requests=%d", reason, self._num_running)
        self._down_reason = reason
        self._disconnect()
        self._connect()
        self.fail_all(reason)

    def _receive_forever(self) -> None:
        while True:
            frame = self._receive(self._say_hello())
            if frame is not None:
                self._dispatch(self._decoder.decode(frame))
                gevent.sleep(0)  # while messages wait nothing else here lets the others run
            else:
                self._check_alive()

    def _receive(self, timeout_s: float) -> bytes | None:
        # NOTE: zmq.green's poll would miss what arrives while another greenlet sends, since that
        # takes the edge away that its file descriptor shows; its recv does not.
        try:
            return cast(bytes, self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        with gevent.Timeout(timeout_s, False):  # pyright: ignore[reportArgumentType]
            return cast(bytes, self._socket.recv())
        return None

    def _check_alive(self) -> None:
        """For when nothing waits: an engine that ended without a word leaves its last ones."""
        if self._monitor.poll(0):
            self._lost("the engine has ended")
        elif self._facts and self._clock() - self._last_heard >= MAX_SILENCE_S:
            self._lost(f"no heartbeat of the engine for {MAX_SILENCE_S:.0f} s")

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Step(generated):
                for each in generated:
                    self._hand_on(each)
            case Performed():
                self._reply(message)
            case Failed(id):
                if id in self._replies:
                    self._reply(message)
                else:
                    self._hand_on(message)
            case Heartbeat(step_age_s, stats):
                self._last_heard, self._step_age_s = self._clock(), step_age_s
                self._stats = stats
            case Ready(facts, adapters):
                self._last_heard, self._facts = self._clock(), facts
                self._adapters = adapters
            case Adapters(loaded):
                self._adapters = loaded
            case Dead(reason):
                self._lost(f"the engine has ended: {reason}")

    def _hand_on(self, message: Generated | Failed) -> None:
        stream = self._streams.get(message.id)
        if stream is None:
            return  # aborted while this was on its way
        stream.push(message)
        if stream.has_ended:
            del self._streams[message.id]

    def _reply(self, message: Performed | Failed) -> None:
        reply = self._replies.get(message.id)
        if reply is None:
            return  # aborted while this was on its way
        reply.push(message)
        if isinstance(message, Failed) or message.is_last:
            del self._replies[message.id]

    def _say_hello(self) -> float:
        """Makes the client known when it is time to; returns how long to wait for messages."""
        if self._facts is not None:
            return LOOK_INTERVAL_S
        if self._clock() >= self._hello_due:
            self._send(Hello())
            self._hello_due = self._clock() + HELLO_INTERVAL_S
        return max(0.0, self._hello_due - self._clock())

    def _send(self, message: ToEngine) -> None:
        self._socket.send(self._encoder.encode(message))  # pyright: ignore[reportUnknownMemberType]
