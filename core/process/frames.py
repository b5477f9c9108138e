"""Messages between a process and its helper: msgpack structs on a socket, prefixed by length."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from core.errors import RequestError
from core.foreign_code import contained
from core.process.processes import die_with_parent

OUT_OF_MEMORY = 3
"""Exit code of a helper whose job needed more memory than its limit."""
_LENGTH_BYTES = 4


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A helper's answer to a job that raised a RequestError."""

    field: str
    message: str


def write_frame(write: Callable[[bytes], object], message: msgspec.Struct) -> None:
    """Write a message with its length. `write` must write all bytes that it is given."""
    write_encoded(write, msgspec.msgpack.encode(message))


def write_encoded(write: Callable[[bytes], object], message: bytes) -> None:
    """Do the same as `write_frame` for a message that is encoded already."""
    write(len(message).to_bytes(_LENGTH_BYTES))
    write(message)


def read_frame(stream: BinaryIO) -> bytes:
    """Return the next message, still encoded. Raises EOFError if the other side has closed."""
    length = int.from_bytes(_read(stream, _LENGTH_BYTES))
    return _read(stream, length)


def _read(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def run_helper(parent: int, start: Callable[[bytes], Callable[[bytes], msgspec.Struct]]) -> int:
    """Perform the parent's jobs until the parent closes the socket, which is our standard input.

    parent: the process id of the parent. This process ends when the parent ends. start: takes the
    first message and returns a function, which performs one job and returns the reply to it. The
    reply to a job that raises RequestError is `Refused`. A job that raises MemoryError ends the
    helper.

    Returns the exit code.
    """
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=sys.stdin.fileno())
    connection.setblocking(True)  # gevent, in the parent, has made it non-blocking
    stream = connection.makefile("rb")
    perform = start(read_frame(stream))
    try:
        while True:
            try:
                job = read_frame(stream)
            except EOFError:
                return 0
            try:
                with contained:
                    reply = perform(job)
            except RequestError as error:
                reply = Refused(error.field, error.message)
            write_frame(connection.sendall, reply)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # at once: the parent kills a helper that only closes the socket
