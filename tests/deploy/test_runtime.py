"""Parsing streams that are split at arbitrary bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.serving import make_server

from container.apis.invocations.event_stream import payload_part
from deploy.__main__ import main
from deploy.sagemaker.runtime import whole_lines
from tests.deploy.conftest import Quiet


@given(
    st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8")), min_size=1),
    st.lists(st.integers(0, 200)),
    st.booleans(),
)
def test_lines_and_characters_are_not_split(lines: list[str], cuts: list[int], ends: bool) -> None:
    data = "\n".join(lines).encode() + b"\n" * ends
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    parts = [data[a:b] for a, b in pairwise(places)]
    expected = lines if ends or lines[-1] else lines[:-1]
    assert list(whole_lines(parts)) == expected


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Serve a streamed response. The test adds the pieces of its body to the yielded list."""
    pieces: list[bytes] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        kind = "application/vnd.amazon.eventstream"
        start_response("200 OK", [("Content-Type", kind), ("Connection", "close")])
        return pieces

    server = make_server("127.0.0.1", 0, app, request_handler=Quiet)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    yield pieces
    server.shutdown()
    server.server_close()
    thread.join()


def exception_frame(kind: str, message: str) -> bytes:
    """Return the error event with which AWS ends a broken stream."""

    def header(name: bytes, value: bytes) -> bytes:
        return struct.pack(f">B{len(name)}sBH", len(name), name, 7, len(value)) + value

    headers = header(b":exception-type", kind.encode()) + header(b":message-type", b"exception")
    payload = b'{"Message":"%s"}' % message.encode()
    lengths = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
    frame = lengths + struct.pack(">I", zlib.crc32(lengths)) + headers + payload
    return frame + struct.pack(">I", zlib.crc32(frame))


def test_a_stream_split_into_odd_parts(
    answer: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    data = '{"text":"Grüße"}\n{"text":"€"}\n'.encode()
    answer += [payload_part(data[place : place + 3]) for place in range(0, len(data), 3)]
    assert main(["stream", "--name", "any", "Hi"]) == 0
    assert capsys.readouterr().out.encode() == data


def test_a_broken_stream(answer: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    answer += [payload_part(b"first\nsec"), exception_frame("ModelStreamError", "timed out")]
    assert main(["stream", "--name", "any", "Hi"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "first\n"
    assert "the stream broke" in printed.err
    assert "timed out" in printed.err


def test_request_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    for body in ("{", "[]"):
        assert main(["invoke", "--name", "any", "--body", body, "--region", "eu-west-1"]) == 1
        assert "--body is not" in capsys.readouterr().err
