"""Hostile requests: one table, a row for each."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

CLOSED = "closed"
"""The server closed the connection without a response."""
HELD = "held"
"""The server neither answered nor closed the connection in time."""
TLS_HELLO = bytes.fromhex("16030100c6010000c20303") + bytes(range(64)) * 3
READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Row:
    """A hostile request, as the bytes that its client sends."""

    name: str
    make: Callable[[], bytes]
    needs_response: bool = True
    """Whether the server must respond. If not, it may also close the connection silently."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How the server ended a row."""

    status: str
    """The HTTP status, CLOSED or HELD."""
    seconds: float


def send(url: str, payload: bytes, timeout_s: float) -> Reply:
    """Send the bytes, and read the server's answer until the server closes the connection."""
    parts = urlsplit(url)
    begin = time.perf_counter()
    answer = b""
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), timeout_s) as connection:
            # The server may refuse the payload before its last byte, and still respond.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(payload)
            while data := connection.recv(READ_BYTES):
                answer = answer or data
    except TimeoutError:
        if not answer:
            return Reply(HELD, time.perf_counter() - begin)
    except OSError:
        pass
    words = answer.split(b" ", 2)
    is_http = words[0].startswith(b"HTTP/") and len(words) == 3
    return Reply(words[1].decode() if is_http else CLOSED, time.perf_counter() - begin)


def _head(path: str, *headers: str) -> bytes:
    return "\r\n".join(
        (f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", "")
    ).encode()


def _post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    return _head(path, f"Content-Type: {content_type}", f"Content-Length: {len(body)}") + body


def _json(path: str, body: dict[str, object]) -> bytes:
    return _post(path, json.dumps(body, separators=(",", ":")).encode())


def _csv(lines: bytes) -> bytes:
    return _post("/invocations", b"inputs\n" + lines, "text/csv")


def _detokenize(tokens: list[int]) -> bytes:
    return _json("/detokenize", {"tokens": tokens})


def _chunked(body: bytes) -> bytes:
    return (
        _head("/invocations", "Content-Type: application/json", "Transfer-Encoding: chunked") + body
    )


def _generate(inputs: str = "a", **parameters: object) -> bytes:
    parameters = {"max_new_tokens": 8, **parameters}
    return _json("/invocations", {"inputs": inputs, "parameters": parameters})


def _complete(**fields: object) -> bytes:
    return _json("/v1/completions", {"prompt": "a", "max_tokens": 8, **fields})


def _rules(count: int) -> bytes:
    """Return a request whose grammar has a chain of rules."""
    chain = [f'r{n}: "a" r{n + 1}' for n in range(count)]
    return _complete(guided_grammar="\n".join(["start: r0", *chain, f'r{count}: "a"']))


def _schemas(count: int) -> bytes:
    """Return a request whose schema has a chain of references."""
    schemas: dict[str, object] = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(count)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**schemas, f"d{count}": {}}}
    return _complete(guided_json=schema)


def _intersection(count: int) -> bytes:
    parts = " & ".join(f"/(.*{n:x}.*)/" for n in range(count))
    return _complete(guided_grammar=f"start: T\nT: {parts}\n")


def _chat(count: int) -> bytes:
    messages = [{"role": "user", "content": "a"}] * count
    return _json("/v1/chat/completions", {"messages": messages, "max_tokens": 8})


MIB = 2**20
ROWS: tuple[Row, ...] = (
    Row("csv, 24 MB", lambda: _csv(b"a,b,c\n" * (4 * MIB))),
    Row("csv with quotes, 24 MB", lambda: _csv(b'"a""b"\n' * (24 * MIB // 7))),
    Row("chunked, 2 M chunks of one byte",
        lambda: _chunked(b"1\r\n \r\n" * 2_000_000 + b"0\r\n\r\n")),
    Row("nested JSON lists, 24 MB",
        lambda: _post("/invocations", b'{"inputs":[' + b"[[[]]]," * (24 * MIB // 7) + b"[]]}")),
    Row("10 M prompt token ids", lambda: _complete(prompt=[1] * 10_000_000)),
    Row("detokenize 8 M ids", lambda: _detokenize([1] * 8_000_000)),
    Row("bad_words, 1 M", lambda: _generate(bad_words=["ab"] * 1_000_000)),
    Row("bad_words, 3 M", lambda: _generate(bad_words=["ab"] * 3_000_000)),
    Row("logit_bias, 1.5 M",
        lambda: _generate(logit_bias=dict.fromkeys(map(str, range(1_500_000)), 1))),
    Row("stop_token_ids, 8 M", lambda: _generate(stop_token_ids=[1] * 8_000_000)),
    Row("allowed_token_ids, 8 M", lambda: _generate(allowed_token_ids=[1] * 8_000_000)),
    Row("text, 20 MB", lambda: _generate("a word " * (20 * MIB // 7))),
    Row("text, 20 MB, truncate", lambda: _generate("a word " * (20 * MIB // 7), truncate=8)),
    Row("regex, alternation of 1 MB",
        lambda: _complete(guided_regex="|".join(f"x{n:06d}" for n in range(131_072)))),
    Row("chat, 400,000 messages", lambda: _chat(400_000)),
    Row("grammar, 20,000 rules", lambda: _rules(20_000)),
    Row("grammar, chain of 2,500 rules", lambda: _rules(2_500)),
    Row("schema, chain of 2,500 references", lambda: _schemas(2_500)),
    Row("schema, chain of 1,200 references", lambda: _schemas(1_200)),
    Row("grammar, intersection of 5,000", lambda: _intersection(5_000)),
    Row("grammar, ambiguous",
        lambda: _complete(guided_grammar="start: s\ns: s s s | s s | /[a-z ]/",
                          max_tokens=200, ignore_eos=True)),
    Row("bad chunk size", lambda: _chunked(b"zz\r\na\r\n0\r\n\r\n")),
    Row("negative chunk size", lambda: _chunked(b"-5\r\na\r\n0\r\n\r\n")),
    Row("TLS hello", lambda: TLS_HELLO, needs_response=False),
    Row("chunk announced, never sent", lambda: _chunked(b"ffff\r\nabc"), needs_response=False),
)  # fmt: skip
"""In the order in which `harm` sends them."""
