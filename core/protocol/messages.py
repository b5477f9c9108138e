"""The messages between front end and engine: tagged msgpack structs over ZeroMQ.

Each front-end worker owns a DEALER socket for every engine. Each engine owns a ROUTER socket at its
address in `Launch.endpoints` (core/protocol/launch.py).

```
front end                                engine
  Hello                        ->
                               <-  Ready, once the model has run; Heartbeat 4 times a second
  Submit(id, ...)              ->
                               <-  Step([(id, Output), ...]) after every step
  Perform(id, ...)             ->  for tasks other than text generation
                               <-  Performed(id, ...), several if the answer comes in parts
  LoadAdapter(id, ...)         ->
  UnloadAdapter(id, ...)       ->
                               <-  Variants([...]) to every client, then Performed(id)
  Watch(seconds), repeated     ->
                               <-  Watched(snapshot), at most 10 a second, until the time is up
  Abort(id), at any time       ->  (no more messages about that id)
                               <-  (but at a stop string with option.receipts, Charged(id))
  Refused({reason: count})     ->  (for the statistics)
                               <-  Dead(reason), if the engine ends by itself
```

Every answer to a Submit ends with exactly one Output that has `finish`. The id ends when its last
answer ends. If the request fails, the id ends with one `Failed` instead. The client may abort the
whole id, or one of its answers, before that.

Any other id ends with one `Performed` that has `is_last`, or one `Failed`, unless it is aborted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from core.errors import FailureKind, LongshoreError, RequestError
from core.foreign_code import reason_of
from core.images import PromptImage, check_images
from core.output import Output
from core.protocol.facts import Facts
from core.protocol.snapshot import Snapshot
from core.protocol.stats import Receipt, Stats
from core.sampling import SamplingParams


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base class of all messages."""


class Hello(Message, frozen=True):
    """Register a client, which repeats this until Ready arrives. The engine answers every Hello."""


class NewRequest(Message, frozen=True):
    """Base class of the messages that start a request."""

    id: str
    """Unique among all clients."""

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that the request adds to the queue: those of its prompt, once per answer."""
        return 0


class EncodedPrompt(msgspec.Struct, frozen=True, tag=True):
    """A prompt as the engine takes it."""

    token_ids: Sequence[int]
    images: tuple[PromptImage, ...] = ()
    """In the order of their positions."""

    def check(self, params: SamplingParams, facts: Facts) -> None:
        """Raise RequestError if the engine cannot take what the prompt has besides tokens."""
        if self.images:
            check_images(
                self.images,
                len(self.token_ids),
                takes_images=facts.takes_images,
                is_cut=params.truncate_prompt_tokens is not None,
            )


class Submit(NewRequest, frozen=True):
    """Generate text."""

    prompt_token_ids: list[int]
    params: SamplingParams
    variant: str = ""
    """Name of a loaded variant; '' for the model itself."""
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, in the order of their positions."""
    api_key: str = ""
    """The name of the API key that it came with; '' without any."""

    @classmethod
    def of(
        cls,
        prompt: EncodedPrompt,
        token_ids: Sequence[int],
        params: SamplingParams,
        variant: str,
        api_key: str,
    ) -> Submit:
        """Return the request for a prompt. Its id is still to be set.

        token_ids: those of the prompt that are left after truncation.
        """
        return cls("", list(token_ids), params, variant, prompt.images, api_key)

    @property
    def num_queued_tokens(self) -> int:
        return len(self.prompt_token_ids) * self.params.num_samples


class Perform(NewRequest, frozen=True):
    """Run the container's task on a body."""

    body: bytes
    """A struct of `core.protocol.task_bodies`, or for a handler the body of the HTTP request."""
    headers: dict[str, str] = {}
    """For a handler: the headers of the HTTP request."""
    variant: str = ""
    """Name of a loaded variant; '' for the model itself."""


class Change(Message, frozen=True):
    """Base class of the messages that change which variants there are."""

    id: str


class LoadAdapter(Change, frozen=True):
    """Load a LoRA adapter from the directory `src`, under `name`."""

    name: str
    src: str


class UnloadAdapter(Change, frozen=True):
    """Unload an adapter. New requests cannot use it; running ones finish normally."""

    name: str


AbortReason = Literal["stop_string", "disconnect", "timeout", "refused"]
"""Why a worker aborts a request: an answer has reached a stop string, the client has disconnected,
option.predict_timeout has passed, or another part of the same HTTP request is invalid."""


class Abort(Message, frozen=True):
    """Stop a request and send nothing more about it. Unknown ids are ignored."""

    id: str
    index: int | None = None
    """Stop only this answer, for example at a stop string. None: stop the whole request."""
    reason: AbortReason = "disconnect"


class Refused(Message, frozen=True):
    """HTTP requests that a worker has refused since its last message of this kind, by reason."""

    counts: dict[str, int]


class Watch(Message, frozen=True):
    """Send snapshots for so many seconds from now on. A later Watch replaces an earlier one."""

    seconds: float


class Variant(msgspec.Struct, frozen=True):
    """The model with a loaded LoRA adapter. A request names it to use it."""

    name: str
    src: str
    """The directory that the adapter was read from."""
    digest: str = ""
    """Of the adapter's files."""


class Ready(Message, frozen=True):
    """The model has run a forward pass. The engine accepts requests."""

    facts: Facts
    variants: tuple[Variant, ...] = ()


class Variants(Message, frozen=True):
    """All loaded variants, sent whenever they change."""

    loaded: tuple[Variant, ...]


class Step(Message, frozen=True):
    """The outputs of one step for this client, each with the id of its request."""

    outputs: list[tuple[str, Output]]


class Charged(Message, frozen=True):
    """Answers an Abort at a stop string that ends the id, with option.receipts."""

    id: str
    receipt: Receipt


class Performed(Message, frozen=True):
    """Answers a Perform, whole or in part, or confirms a LoadAdapter or UnloadAdapter.

    If there are several parts, the first one carries the content type, the status and the headers.
    """

    id: str
    body: bytes = b""
    content_type: str = ""
    code: int = 200
    """HTTP status."""
    headers: dict[str, str] = {}
    is_last: bool = True
    """Ends the id. The last one of several parts has an empty body."""


class Failed(Message, frozen=True):
    """Ends the id: the request was refused, or (kind `failed`) failed while it ran."""

    id: str
    kind: FailureKind
    message: str
    field: str = ""
    """For `rejected`, the invalid field: `prompt`, or a field of SamplingParams or of the body."""

    @classmethod
    def of(cls, id: str, error: BaseException) -> Failed:
        """Return the message from which a worker restores the error (`failure_of`).

        An error without a kind of its own becomes `failed`, with its type in the message.
        """
        kind = error.kind if isinstance(error, LongshoreError) else "failed"
        if kind == "failed":
            return cls(id, kind, reason_of(error))
        if isinstance(error, RequestError):
            return cls(id, kind, error.message, error.field)
        return cls(id, kind, str(error))


class Heartbeat(Message, frozen=True):
    """Sent four times a second, even if the step loop is stuck."""

    step_age_s: float
    """Seconds since the loop last finished a step or was idle."""
    stats: Stats
    stalled_s: float = 0.0
    """Seconds for which every thread of the engine has slept during the current step. 0 for
    handlers, which may sleep."""


class Watched(Message, frozen=True):
    """The state of the engine, for a client that watches."""

    snapshot: Snapshot


class Dead(Message, frozen=True):
    """The engine is about to end. All its requests have failed."""

    reason: str


ToEngine = Hello | Submit | Perform | LoadAdapter | UnloadAdapter | Abort | Refused | Watch
FromEngine = Ready | Variants | Step | Charged | Performed | Failed | Heartbeat | Watched | Dead
