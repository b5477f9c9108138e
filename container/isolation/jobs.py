"""The jobs of the helper process, as msgpack structs in frames on a socket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgspec

from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplateSource

_LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True):
    """The first message: what the process needs for its jobs."""

    model_dir: str
    template: ChatTemplateSource | None


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Convert a constraint to a grammar, and compile it as the engine does."""

    form: StructuredOutputsParams
    eos_token_ids: tuple[int, ...]


class Render(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Render a conversation with the chat template. The fields are those of `Conversation`."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]


Job = Compile | Render


class Done(msgspec.Struct, frozen=True, tag=True):
    """The result of a job: the grammar in llguidance's format, or the prompt."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The job raised a RequestError."""

    field: str
    message: str


Reply = Done | Refused


def write_frame(write: Callable[[bytes], object], message: msgspec.Struct) -> None:
    """Write a message with its length. `write` must write all bytes that it is given."""
    body = msgspec.msgpack.encode(message)
    write(len(body).to_bytes(_LENGTH_BYTES) + body)


def read_frame(stream: BinaryIO) -> bytes:
    """Return the next message, still encoded. Raises EOFError if the other side has closed."""
    length = int.from_bytes(_read(stream, _LENGTH_BYTES))
    return _read(stream, length)


def _read(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data
