"""The limits of a connection, on a fake clock and a fake socket."""

from __future__ import annotations

from typing import Any

import gevent
import pytest
from gunicorn.config import Config
from gunicorn.http.message import Request
from gunicorn.http.unreader import SocketUnreader

from container.front_end.arrival import DRAIN_BYTES, Arrival, ArrivingBody, SlowReaderError
from container.front_end.body_memory import BodyMemory
from container.http.deadline import ArrivalTimeoutError, ClientGoneError
from core.configuration.limits import CHUNKS
from core.configuration.options import ServerOptions
from core.errors import OverloadedError, RequestError
from tests.clock import Clock

OPTIONS = ServerOptions(header_timeout=10, body_timeout=60, write_timeout=5)
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


class Client:
    """A socket whose peer sends `pieces`, each after `gap_s`, and reads `space` bytes."""

    def __init__(self, clock: Clock, pieces: list[bytes], gap_s: float = 0, space: int = 0) -> None:
        self.sent = b""
        self.has_shut_down = False
        self._clock = clock
        self._pieces = pieces
        self._gap_s = gap_s
        self.space = space
        self._timeout: float | None = None

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def setsockopt(self, level: int, option: int, value: int) -> None: ...

    def shutdown(self, how: int) -> None:
        self.has_shut_down = True

    def recv(self, size: int) -> bytes:
        self._wait(self._gap_s)
        if not self._pieces:
            return b""
        piece = self._pieces.pop(0)
        if len(piece) > size:
            self._pieces.insert(0, piece[size:])
        return piece[:size]

    def send(self, data: memoryview | bytes, flags: int = 0, timeout: float | None = None) -> int:
        if not self.space:
            if timeout == 0:
                raise BlockingIOError
            self._wait(1e9)
        count = min(self.space, len(data))
        self.sent += bytes(data[:count])
        self.space -= count
        return count

    def _wait(self, seconds: float) -> None:
        if self._timeout is not None and seconds > self._timeout:
            self._clock.now += self._timeout
            raise TimeoutError
        self._clock.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def arrival(clock: Clock, *pieces: bytes, memory: BodyMemory | None = None, **how: Any) -> Arrival:
    memory = memory or BodyMemory(OPTIONS.max_body_memory)
    return Arrival(Client(clock, list(pieces), **how), OPTIONS, memory, clock)


def request(connection: Arrival) -> Request:
    connection.expect_head()
    unreader = SocketUnreader(connection)  # pyright: ignore[reportArgumentType]
    return Request(Config(), unreader, ("127.0.0.1", 1))


def body_of(connection: Arrival) -> ArrivingBody:
    parsed = request(connection)
    connection.expect_body()
    return ArrivingBody.of(parsed)


def test_a_head_that_dribbles_is_late(clock: Clock) -> None:
    letters = [bytes([letter]) for letter in HEAD * 9]
    with pytest.raises(ArrivalTimeoutError, match="header_timeout"):
        request(arrival(clock, *letters, gap_s=1))
    # The clock starts at 100. The first byte comes after 1 s, and header_timeout=10 counts from it.
    assert clock.now == 100 + 1 + 10


def test_waiting_for_a_request_has_no_deadline(clock: Clock) -> None:
    whole = HEAD + b"Content-Length: 0\r\n\r\n"
    assert request(arrival(clock, whole, gap_s=70)).method == "POST"


@pytest.mark.parametrize("framing", ["Content-Length: 9", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come_is_late(clock: Clock, framing: str) -> None:
    body = body_of(arrival(clock, HEAD + framing.encode() + b"\r\n\r\n5\r\n", gap_s=61))
    with pytest.raises(ArrivalTimeoutError, match="body_timeout"):
        body.read()


def test_a_body_that_arrives_in_time_is_read(clock: Clock) -> None:
    pieces = [bytes([letter]) for letter in b"12345"]
    body = body_of(arrival(clock, HEAD + b"Content-Length: 5\r\n\r\n", *pieces, gap_s=11))
    assert body.read() == b"12345"


@pytest.mark.parametrize("chunk", [b"zz\r\nabc", b"-5\r\nabc", b"3\r\nabcd\r\n"])
def test_malformed_chunks_are_the_clients_error(clock: Clock, chunk: bytes) -> None:
    body = body_of(arrival(clock, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk))
    with pytest.raises(RequestError, match="body: is malformed"):
        body.read()


def test_a_body_that_ends_early_is_no_error_of_ours(clock: Clock) -> None:
    body = body_of(arrival(clock, HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"))
    with pytest.raises(ClientGoneError):
        body.read()


@pytest.mark.parametrize("count", [CHUNKS.maximum - 1, CHUNKS.maximum])
def test_tiny_chunks_are_counted(clock: Clock, count: int) -> None:
    """The empty chunk that ends the body counts, too."""
    chunks = b"1\r\na\r\n" * count + b"0\r\n\r\n"
    body = body_of(arrival(clock, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks))
    if count < CHUNKS.maximum:
        assert body.read() == b"a" * count
        return
    with pytest.raises(RequestError, match="16,385 chunks"):
        body.read()


@pytest.mark.parametrize("hello", [b"\x16\x03\x01\x00\xc8\x01", b"\x80\x2e\x01"])
def test_other_protocols_are_refused_at_their_first_byte(clock: Clock, hello: bytes) -> None:
    with pytest.raises(RequestError, match="not HTTP"):
        request(arrival(clock, hello))
    assert clock.now == 100


def test_the_rest_of_a_body_is_read_so_that_the_client_sees_the_response(clock: Clock) -> None:
    head = HEAD + b"Content-Length: %d\r\n\r\n"
    connection = arrival(clock, head % 3, b"abc")
    assert connection.drain(body_of(connection))
    connection = arrival(clock, head % (DRAIN_BYTES + 1), b"a" * (DRAIN_BYTES + 1))
    assert not connection.drain(body_of(connection))
    connection = arrival(clock, head % 99, *[b"a"] * 99, gap_s=1)
    assert not connection.drain(body_of(connection))


def test_the_bodies_of_all_connections_share_a_memory_limit(clock: Clock) -> None:
    memory = BodyMemory(10)
    head = HEAD + b"Content-Length: %d\r\n\r\n"
    first = arrival(clock, head % 12, b"a" * 12, memory=memory)
    assert body_of(first).read() == b"a" * 12, "too large, but the only body"
    second = arrival(clock, head % 3, b"abc", memory=memory)
    with pytest.raises(OverloadedError, match=r"10 bytes .*max_body_memory"):
        body_of(second).read()
    second.release_body()
    first.release_body()
    third, fourth = (arrival(clock, head % 5, b"abcde", memory=memory) for _ in range(2))
    assert body_of(third).read() == body_of(fourth).read() == b"abcde", "both fit into 10 bytes"


def test_the_rest_of_a_body_takes_no_memory(clock: Clock) -> None:
    memory = BodyMemory(4)
    waiting = arrival(clock, HEAD + b"Content-Length: 2\r\n\r\n", b"ab", memory=memory)
    assert body_of(waiting).read() == b"ab"
    connection = arrival(clock, HEAD + b"Content-Length: 9\r\n\r\n", b"a" * 9, memory=memory)
    assert connection.drain(body_of(connection))


def test_a_connection_that_ends_is_read_for_two_seconds(clock: Clock) -> None:
    client = Client(clock, [b"a"] * 99, gap_s=0.5)
    Arrival(client, OPTIONS, BodyMemory(1), clock).linger()
    assert (client.has_shut_down, clock.now) == (True, 102)


def test_a_client_that_does_not_read_is_cut_off(clock: Clock) -> None:
    client = Client(clock, [], space=4)
    connection = Arrival(client, OPTIONS, BodyMemory(1), clock)
    with pytest.raises(SlowReaderError):
        connection.sendall(b"123456")
    assert (client.sent, clock.now) == (b"1234", 105)


def test_a_client_that_reads_gets_everything(clock: Clock) -> None:
    client = Client(clock, [], space=6)
    Arrival(client, OPTIONS, BodyMemory(1), clock).sendall(b"123456")
    assert client.sent == b"123456"


@pytest.mark.parametrize("space", [0, 1, 8, 13])
def test_what_a_chunk_leaves_is_sent_before_what_follows(clock: Clock, space: int) -> None:
    client = Client(clock, [], space=space)
    connection = Arrival(client, OPTIONS, BodyMemory(1), clock)
    assert connection.send_chunk is not None
    chunks = b"2\r\nab\r\n1\r\nc\r\n"
    assert connection.send_chunk(b"ab")
    assert connection.send_chunk(b"c")
    assert client.sent == b"", "until the loop's next turn"
    gevent.sleep(0)
    assert (client.sent, clock.now) == (chunks[:space], 100), "it does not wait"
    assert connection.send_chunk(b"d") is (space == len(chunks)), "the client is behind"
    client.space = 99
    connection.sendall(b"0\r\n\r\n")
    gevent.sleep(0)
    assert client.sent == chunks + b"1\r\nd\r\n0\r\n\r\n"


def test_a_lost_client_fails_the_next_sendall(clock: Clock) -> None:
    client = Client(clock, [])
    connection = Arrival(client, OPTIONS, BodyMemory(1), clock)
    assert connection.send_chunk is not None
    connection.send_chunk(b"ab")
    gevent.sleep(0)
    with pytest.raises(SlowReaderError):
        connection.sendall(b"")
