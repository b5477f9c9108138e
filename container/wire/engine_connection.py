"""A worker's connection to one engine: a DEALER socket and a queue per running request.

Uses gevent's primitives explicitly, so it works with and without monkey-patching. All calls must
come from the thread that created the connection.
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
import gevent.event
import msgspec
import zmq.green as zmq

from container.wire.silence import Silence
from container.wire.snapshots import SnapshotFeed
from container.wire.task_reply import TaskReply
from container.wire.token_stream import TokenStream
from core.adapter import Adapter
from core.errors import EngineUnavailableError
from core.images import PromptImage
from core.output import Output
from core.protocol.messages import (
    Abort,
    AbortReason,
    Adapters,
    Dead,
    Facts,
    Failed,
    FromEngine,
    Heartbeat,
    Hello,
    LoadAdapter,
    Perform,
    Performed,
    Ready,
    Refused,
    Step,
    Submit,
    ToEngine,
    UnloadAdapter,
    Watch,
    Watched,
)
from core.protocol.stats import Stats
from core.sampling import SamplingParams

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 1.0
MAX_UNANSWERED_HELLOS = 60
"""After so many Hellos without an answer the socket is replaced, because it would keep every Hello
until an engine reads it."""
LIVENESS_CHECK_INTERVAL_S = 0.25
"""How long `recv` waits before checking whether the engine is still alive."""
UNHEALTHY_SILENCE_S = 4.0
"""An engine that has been silent for this long is not healthy. It may recover."""
MAX_SILENCE_S = 10.0
"""An engine that has been silent for this long is considered dead; its requests fail."""
MAX_STALLED_S = 2.5
"""If no thread of the engine has run for this long within a step, the step is said to hang."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine can answer requests now; `reason` says why not."""

    healthy: bool
    reason: str


class EngineConnection:
    """Submits requests to the engine at `endpoint` and routes its replies to their handlers."""

    def __init__(
        self,
        endpoint: str,
        heartbeat_timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        copy: str = "",
    ) -> None:
        """copy: the number of the engine's copy of the model, for the log. It is '' if there is
        only one copy."""
        self.endpoint = endpoint
        self._copy = copy
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._clock = clock
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._streams: dict[str, TokenStream] = {}
        self._replies: dict[str, TaskReply] = {}
        self._refused: dict[str, int] = {}
        self.snapshots = SnapshotFeed(self._watch, clock)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self.ready = gevent.event.Event()
        """Set while the engine accepts requests."""
        self._context = zmq.Context()
        self._connect()
        self._down_reason = "the engine is starting"
        self._receiver: gevent.Greenlet[[], None] = gevent.spawn(self._receive_forever)

    @property
    def facts(self) -> Facts:
        """The settings the engine resolved. Raises EngineUnavailableError while it is not ready."""
        if self._facts is None:
            raise EngineUnavailableError(self._down_reason)
        return self._facts

    @property
    def stats(self) -> Stats:
        """The engine's counters as of its last heartbeat."""
        return self._stats

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests. It may hang, see `health`."""
        return self._facts is not None

    @property
    def load(self) -> int:
        """The engine's unfinished requests, of this worker and of others.

        The number of other workers' requests is as of the last heartbeat, and counts every answer.
        """
        return self._num_running + self._num_of_others

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The loaded adapters, as the engine last reported them; empty while it is not ready."""
        return self._adapters

    def health(self) -> Health:
        """Check that the engine is ready, sends heartbeats and completes steps."""
        if self._facts is None:
            return Health(False, self._down_reason)
        silence_s = self._silence.seconds
        if silence_s >= UNHEALTHY_SILENCE_S:
            return Health(False, f"no heartbeat from the engine for {silence_s:.0f} s")
        if self._stalled_s >= MAX_STALLED_S:
            stalled = f"no thread has run for {self._stalled_s:.0f} s"
            return Health(False, f"the engine hangs in a step: {stalled}")
        age = self._step_age_s
        if age >= self._heartbeat_timeout_s:
            return Health(False, f"the engine is stuck: no step completed for {age:.0f} s")
        return Health(True, "")

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str = "",
        images: tuple[PromptImage, ...] = (),
    ) -> TokenStream:
        """Start a generation. Raises EngineUnavailableError while the engine is not ready."""
        stream = TokenStream(self._new_id(), params.num_answers, self.abort)
        self._send(Submit(stream.id, list(prompt_token_ids), params, adapter, images))
        self._streams[stream.id] = stream
        return stream

    def perform(self, body: bytes, headers: Mapping[str, str]) -> TaskReply:
        """Start a task. Raises EngineUnavailableError while the engine is not ready."""
        return self._request(Perform(self._new_id(), body, dict(headers)))

    def load_adapter(self, name: str, src: str) -> TaskReply:
        """Load the adapter at `src`. Raises EngineUnavailableError like `perform`."""
        return self._request(LoadAdapter(self._new_id(), name, src))

    def unload_adapter(self, name: str) -> TaskReply:
        """Unload an adapter. Raises EngineUnavailableError like `perform`."""
        return self._request(UnloadAdapter(self._new_id(), name))

    def count_refusal(self, reason: str) -> None:
        """Count a refused HTTP request.

        The counts are sent to the engine when its next heartbeat arrives.
        """
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def abort_task(self, id: str, reason: AbortReason = "disconnect") -> None:
        """Abort a task or an adapter request, unless its reply is complete."""
        if self._replies.pop(id, None) is not None:
            self._send(Abort(id, None, reason))

    def abort(self, id: str, index: int | None = None, reason: AbortReason = "disconnect") -> None:
        """Abort a running generation request, or only the answer with this index.

        Drops messages that still arrive for an aborted request.
        """
        if id not in self._streams:
            return
        if index is None:
            del self._streams[id]
        self._send(Abort(id, index, reason))

    def fail_all(self, reason: str) -> None:
        """Fail every running request with `reason`."""
        running = [*self._streams.values(), *self._replies.values()]
        self._streams.clear()
        self._replies.clear()
        for request in running:
            request.push(Failed(request.id, "failed", reason))

    def _request(self, message: Perform | LoadAdapter | UnloadAdapter) -> TaskReply:
        reply = TaskReply(message.id, self.abort_task)
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
        """Fail the running requests and close the socket."""
        self._receiver.kill()
        self.snapshots.close()
        self.fail_all("the front end is closing")
        self._disconnect()
        self._context.term()

    def _connect(self) -> None:
        self._facts: Facts | None = None
        self.ready.clear()
        self._adapters: tuple[Adapter, ...] = ()
        self._step_age_s = 0.0
        self._stalled_s = 0.0
        self._stats = Stats()
        self._num_of_others = 0
        self._silence = Silence(self._clock)
        self._hello_due = self._clock()
        self._num_hellos = 0
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        # NOTE: do not set `immediate`: on a disconnect it drops received messages, such as Dead.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self.endpoint)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _reconnect(self, reason: str) -> None:
        """Fail the running requests and wait for a new engine, on a new socket.

        Messages still queued in the old socket are stale.
        """
        which = f" copy={self._copy}" if self._copy else ""
        logger.warning("engine=lost%s reason=%r requests=%d", which, reason, self._num_running)
        self._down_reason = reason
        self._disconnect()
        self._connect()
        self.fail_all(reason)

    def _receive_forever(self) -> None:
        while True:
            frame = self._receive(self._say_hello())
            if frame is not None:
                self._silence.heard()
                self._dispatch(self._decoder.decode(frame))
                gevent.sleep(0)  # lets other greenlets run even while more messages wait
            else:
                self._silence.listened()
                self._check_alive()

    def _receive(self, timeout_s: float) -> bytes | None:
        # NOTE: zmq.green's poll misses messages that arrive while another greenlet sends, because
        # sending consumes the edge-triggered event of the socket's file descriptor. recv does not.
        frame = self._receive_now()
        if frame is not None:
            return frame
        with gevent.Timeout(timeout_s, False):  # pyright: ignore[reportArgumentType]
            return cast(bytes, self._socket.recv())
        # If the event loop was held up, the time is over but messages may have arrived.
        return self._receive_now()

    def _receive_now(self) -> bytes | None:
        try:
            return cast(bytes, self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _check_alive(self) -> None:
        """Reconnect if the engine has died without sending Dead.

        Call only when no message waits, so that the engine's last messages are read first.
        """
        if self._monitor.poll(0):
            self._reconnect("the engine has ended")
        elif self._facts and self._silence.seconds >= MAX_SILENCE_S:
            self._reconnect(f"no heartbeat from the engine for {MAX_SILENCE_S:.0f} s")

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Step(outputs):
                for id, output in outputs:
                    self._push_to_stream(id, output)
            case Performed():
                self._push_to_reply(message)
            case Failed():
                self._push_failure(message)
            case Heartbeat(step_age_s, stats, stalled_s):
                self._step_age_s, self._stalled_s = step_age_s, stalled_s
                self._stats = stats
                reported = stats.num_running + stats.num_waiting
                self._num_of_others = max(0, reported - self._num_running)
                self._report_refusals()
            case Ready(facts, adapters):
                self._facts = facts
                self._adapters = adapters
                self.ready.set()
            case Adapters(loaded):
                self._adapters = loaded
            case Watched(snapshot):
                self.snapshots.push(snapshot)
            case Dead(reason):
                self._reconnect(f"the engine has ended: {reason}")

    def _push_failure(self, failure: Failed) -> None:
        if failure.id in self._replies:
            self._push_to_reply(failure)
        else:
            self._push_to_stream(failure.id, failure)

    def _push_to_stream(self, id: str, message: Output | Failed) -> None:
        stream = self._streams.get(id)
        if stream is None:
            return  # aborted while this message was in flight
        stream.push(message)
        if stream.has_ended:
            del self._streams[id]

    def _push_to_reply(self, message: Performed | Failed) -> None:
        reply = self._replies.get(message.id)
        if reply is None:
            return  # aborted while this message was in flight
        reply.push(message)
        if isinstance(message, Failed) or message.is_last:
            del self._replies[message.id]

    def _report_refusals(self) -> None:
        if self._refused:
            self._send(Refused(self._refused))
            self._refused = {}

    def _watch(self, seconds: float) -> None:
        if self._facts is not None:
            self._send(Watch(seconds))

    def _say_hello(self) -> float:
        """Send Hello to an engine that is not ready yet, once per HELLO_INTERVAL_S.

        Returns how many seconds to wait for messages.
        """
        if self._facts is not None:
            return LIVENESS_CHECK_INTERVAL_S
        if self._clock() >= self._hello_due:
            if self._num_hellos == MAX_UNANSWERED_HELLOS:
                self._disconnect()
                self._connect()
            self._num_hellos += 1
            self._send(Hello())
            self._hello_due = self._clock() + HELLO_INTERVAL_S
        return max(0.0, self._hello_due - self._clock())

    def _send(self, message: ToEngine) -> None:
        self._socket.send(self._encoder.encode(message))  # pyright: ignore[reportUnknownMemberType]
