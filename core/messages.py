"""What front end and engine say to each other: tagged msgpack structs over ZeroMQ.

A front-end worker owns a DEALER socket, the engine a ROUTER socket at `Launch.endpoint`.

```
front end                                engine
  Hello                        ->
                               <-  Ready, once the model answers; Heartbeat 4 times a second
  Submit(id, ...)              ->
                               <-  Step([Generated(id, ...), ...]) after every step
  Perform(id, ...)             ->  where the task is not to generate
                               <-  Performed(id, ...), several where it is sent in parts
  LoadAdapter(id, ...)         ->
  UnloadAdapter(id, ...)       ->
                               <-  Adapters([...]) to every client, then Performed(id)
  Abort(id), at any time       ->  (silence about that id from then on)
                               <-  Dead(reason), where it ends by itself
```

Every answer of a submitted id gets exactly one `Generated` with `finish`, and the id is over with
its last answer; or it gets one `Failed`. Its client may abort it, or one of its answers, first.
Any other id gets one `Performed` with `is_last`, or one `Failed`, unless it is aborted.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from core.adapter import Adapter
from core.options import Batching, Options
from core.sampling import Finish, SamplingParams, TopLogprobs
from core.stats import Stats, Timing
from core.task import GENERATION, Task


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything that crosses the socket."""


class Hello(Message, frozen=True):
    """A client makes itself known; repeated until Ready arrives, and harmless after."""


class Submit(Message, frozen=True):
    """Generate. `id` is unique among all clients."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str = ""
    """Name of a loaded one; '' is the model itself."""


class Perform(Message, frozen=True):
    """Do the container's task with a body. `id` is unique among all clients."""

    id: str
    body: bytes
    """As `core.task_bodies` says, or for a handler that of the HTTP request."""
    headers: dict[str, str] = {}
    """For a handler: those of the HTTP request."""


class LoadAdapter(Message, frozen=True):
    """Read a LoRA adapter from the directory `src`, for requests to use under `name`."""

    id: str
    name: str
    src: str


class UnloadAdapter(Message, frozen=True):
    """No new request may use the adapter; those that run end as they would."""

    id: str
    name: str


class Abort(Message, frozen=True):
    """Stop generating and say nothing more of it. Unknown ids are no error."""

    id: str
    index: int | None = None
    """One answer alone, such as one that has reached a stop text; None: the request."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What start-up resolved; carried by Ready and printed once.

    What concerns tokens is 0 or empty where the task is not to generate.
    """

    model: str
    task: str = GENERATION[0]
    architecture: str
    batching: Batching
    batching_reason: str
    executor: Literal["packed", "library", "task"]
    executor_reason: str
    decoder: str = ""
    """packed: whose code computes the layers, and why not ours."""
    device: str
    dtype: str
    kv_dtype: str = ""
    max_model_len: int = 0
    max_sequences: int
    """Most that run at once; requests, where the task is not to generate."""
    max_step_tokens: int = 0
    block_size: int = 0
    num_kv_blocks: int = 0
    num_swap_blocks: int = 0
    weights_bytes: int
    kv_bytes: int = 0
    activation_bytes: int = 0
    """Kept free for the largest step, where that was measured."""
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    load_seconds: float
    phases: dict[str, float] = {}
    """What start-up spent its time on, in seconds, in order."""
    scores_prompts: bool = True
    """Whether requests may ask for `prompt_logprobs`."""
    notes: tuple[str, ...] = ()
    """Decisions worth a line at start-up, such as a clamped limit."""


class Ready(Message, frozen=True):
    """The model has passed a real forward; requests are welcome."""

    facts: Facts
    adapters: tuple[Adapter, ...] = ()


class Adapters(Message, frozen=True):
    """All that are loaded, whenever one comes or goes."""

    loaded: tuple[Adapter, ...]


class Generated(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one answer, or scores of its prompt; its last ones if `finish` is set."""

    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | None = None
    index: int = 0
    """Which of the answers that it tells (`SamplingParams.num_answers`)."""
    top: tuple[TopLogprobs, ...] = ()
    """One a token, where the request wants `logprobs`."""
    prompt: tuple[TopLogprobs, ...] = ()
    """The next tokens of the prompt, from its second on, where it wants `prompt_logprobs`."""
    timing: Timing | None = None
    """With `finish`."""


class Step(Message, frozen=True):
    """All that one step produced for this client."""

    generated: list[Generated]


class Performed(Message, frozen=True):
    """The answer to a Perform, or a part of it; what is beside the body counts in the first.

    Or that an adapter is loaded or unloaded.
    """

    id: str
    body: bytes = b""
    content_type: str = ""
    code: int = 200
    """HTTP status."""
    headers: dict[str, str] = {}
    is_last: bool = True
    """Terminal; in an answer of several parts its body is empty."""


class Failed(Message, frozen=True):
    """Terminal: the request was refused, or (`failed`) failed while it ran."""

    id: str
    kind: Literal["rejected", "overloaded", "not_found", "conflict", "no_room", "failed"]
    message: str
    field: str = ""
    """For `rejected`: the field of SamplingParams, or `prompt`, or what the body names."""


class Heartbeat(Message, frozen=True):
    """Sent four times a second, whether or not the step loop moves."""

    step_age_s: float
    """Seconds since the loop last ended a step or was seen idle."""
    stats: Stats


class Dead(Message, frozen=True):
    """The engine is about to end; every request it held has failed."""

    reason: str


ToEngine = Hello | Submit | Perform | LoadAdapter | UnloadAdapter | Abort
FromEngine = Ready | Adapters | Step | Performed | Failed | Heartbeat | Dead


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor hands to the processes it starts, as a JSON file."""

    model_dir: str
    """Local directory of the model's files."""
    endpoint: str
    """ZeroMQ address on which the engine answers."""
    port: int
    socket: str = ""
    """Path of a Unix socket to serve on, in place of the port."""
    name: str = ""
    """What clients call the model. Default: the last part of its id or directory."""
    options: Options
    task: Task = Task()
    library_dir: str = ""
    """Where the packages of the requirements.txt beside the user's code lie."""
    formatters: str = ""
    """The file of the user's formatters, for the front end."""
