"""SageMaker's bidirectional streams: WebSockets to a real front end with a fake engine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from container.apis.invocations.upgrade import PATH
from core.configuration.limits import SOCKET_MESSAGES
from core.protocol.messages import Abort, Refused, Submit
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS
from tests.container.fake_engine import FakeEngine, says, stalls
from tests.container.http.test_frontend import with_time_to_stop, write_launch
from tests.container.processes import HANG_S, Caller, free_port, running, wait_until

KEY = {"Authorization": "Bearer a-key"}
LIMITED = {"x-api-key": "limited"}
"""A key with three requests per minute: one upgrade and two messages."""
MAX_BYTES = 2**16
TEXT = {"inputs": "Q"}
CHAT = {"messages": [{"role": "user", "content": "Q"}]}
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
PART = b"\x01\x81\x00\x00\x00\x00{"
"""A frame with the first character of a message. The frames with the rest are never sent."""


class Server:
    """A front end, its engine, and clients for WebSockets and for plain HTTP."""

    def __init__(self, port: int, engine: FakeEngine) -> None:
        self.port = port
        self.engine = engine

    def open(self, headers: dict[str, str] = KEY, **options: Any) -> ClientConnection:
        return connect(
            f"ws://127.0.0.1:{self.port}{PATH}",
            additional_headers=headers,
            proxy=None,
            ping_interval=None,
            close_timeout=HANG_S,
            **options,
        )

    def request(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {**KEY, **headers})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def begins(self, number: int) -> list[Submit]:
        """Wait until the engine has got this many requests in all, and return all of them."""
        wait_until(lambda: len(self.engine.of_type(Submit)) == number)
        return [submit for submit in self.engine.of_type(Submit) if isinstance(submit, Submit)]

    def finish(self, submit: Submit, token_ids: list[int]) -> None:
        for step in says(token_ids)(submit):
            self.engine.send(step)


@pytest.fixture(scope="module")
def front_end(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> Iterator[tuple[int, str]]:
    """Start a front end. Yield its port and the endpoint at which it expects a test's engine."""
    folder = tmp_path_factory.mktemp("socket")
    keys, template = folder / "keys", folder / "template.jinja"
    keys.write_text("a-key\nlimited name=limited requests_per_minute=3\n")
    template.write_text("{% for each in messages %}{{ each.content }};{% endfor %}")
    endpoint, port = f"ipc://{folder}/engine.sock", free_port()
    launch = write_launch(
        folder,
        tokenizer_dir,
        endpoint,
        port,
        api_keys_file=str(keys),
        chat_template=str(template),
        max_request_size=MAX_BYTES,
        max_body_memory=MAX_BYTES,
        body_timeout=2,
    )
    with running(["-m", "container.front_end.start", str(os.getpid()), str(launch)]):
        wait_until(lambda: Caller(port).ping() is not None)
        yield port, endpoint


@pytest.fixture
def server(front_end: tuple[int, str], tokenizer: Tokenizer) -> Iterator[Server]:
    """The module's front end with an engine that says "Hi there"."""
    port, endpoint = front_end
    engine = FakeEngine(endpoint, says([*tokenizer.encode("Hi there"), EOS]))
    wait_until(lambda: engine.num_clients)
    wait_until(Caller(port).is_healthy)
    yield Server(port, engine)
    engine.close()


def ask(client: ClientConnection, body: object) -> Any:
    client.send(json.dumps(body))
    return answer(client)


def answer(client: ClientConnection) -> Any:
    text = client.recv(timeout=HANG_S)
    assert isinstance(text, str)
    assert not text.endswith("\n")
    return json.loads(text)


def close_code(client: ClientConnection) -> int:
    """Return the code with which the server closes the socket."""
    with pytest.raises(ConnectionClosed) as closed:
        client.recv(timeout=HANG_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


def content(record: Any) -> Any:
    """Return a record without the fields that differ from answer to answer."""
    return {name: value for name, value in record.items() if name not in ("id", "created")}


@pytest.mark.parametrize("body", [TEXT, CHAT, {"prompt": "Q"}], ids=["text", "chat", "prompt"])
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_answers_are_those_of_http_whole_and_streamed(
    server: Server, body: dict[str, object], accept: str
) -> None:
    stream = {**body, "stream": True}
    _, _, whole = server.request("POST", "/invocations", body)
    _, headers, records = server.request("POST", "/invocations", stream, Accept=accept)
    is_sse = headers["Content-Type"].startswith("text/event-stream")
    assert is_sse == (accept == "text/event-stream")
    lines = [line for line in records.decode().splitlines() if line]
    expected = [line.removeprefix("data: ") for line in lines]
    assert len(expected) > 8
    with server.open({**KEY, "Accept": accept}) as client:
        assert content(ask(client, body)) == content(json.loads(whole))
        client.send(json.dumps(stream))
        for record in expected:
            text = client.recv(timeout=HANG_S)
            if record == "[DONE]":
                assert text == record
            else:
                assert content(json.loads(text)) == content(json.loads(record))
        assert content(ask(client, body)) == content(json.loads(whole)), "the stream is over"


def test_a_bad_message_is_answered_with_its_error_and_the_socket_stays_open(
    server: Server,
) -> None:
    with server.open() as client:
        client.send("{")
        assert answer(client)["code"] == 400
        error = ask(client, {**TEXT, "parameters": {"max_new_tokens": "many"}})
        assert (error["code"], error["field"]) == (400, "parameters.max_new_tokens")
        assert ask(client, TEXT)["generated_text"] == "Hi there"


def test_messages_may_be_binary_and_in_fragments(server: Server) -> None:
    text = json.dumps({"inputs": "é"}, ensure_ascii=False)
    data = text.encode()
    with server.open() as client:
        for message in (data, [text[:4], "", text[4:]], [bytes([byte]) for byte in data]):
            client.send(message)
            assert answer(client)["generated_text"] == "Hi there"
    prompts = [submit.prompt_token_ids for submit in server.begins(3)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_messages_are_answered_in_order_and_only_some_wait(server: Server) -> None:
    """If the server read all messages at once, the last ones would find no memory."""
    num_messages = 2 * SOCKET_MESSAGES.maximum
    padding = " " * (MAX_BYTES // (SOCKET_MESSAGES.maximum + 4))
    server.engine.script = stalls()
    with server.open() as client:
        for number in range(num_messages):
            parameters = {"max_new_tokens": number + 1}
            client.send(json.dumps({**TEXT, "parameters": parameters}) + padding)
        (first,) = server.begins(1)
        # When this request is answered, the server has read as many messages as it takes at once.
        assert Caller(server.port).is_healthy()
        server.engine.script = says([65] * num_messages)
        server.finish(first, [65])
        lengths = [len(answer(client)["generated_text"]) for _ in range(num_messages)]
    assert lengths == list(range(1, num_messages + 1))


def test_a_ping_is_answered_while_a_request_runs(server: Server) -> None:
    server.engine.script = stalls()
    with server.open() as client:
        client.send(json.dumps(TEXT))
        (submit,) = server.begins(1)
        assert client.ping("are you there?").wait(HANG_S)
        server.finish(submit, [65, EOS])
        assert answer(client)["generated_text"] == "b"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_closes_the_socket_aborts_its_request(
    server: Server, is_stream: bool
) -> None:
    server.engine.script = stalls(after=[65])
    with server.open() as client:
        client.send(json.dumps({**TEXT, "stream": is_stream}))
        server.begins(1)
        client.close(4321)
    assert client.close_code == 4321, "the server has answered the closing frame"
    wait_until(lambda: server.engine.of_type(Abort))


def test_a_client_that_disconnects_aborts_its_request(server: Server) -> None:
    server.engine.script = stalls(after=[65])
    with server.open() as client:
        client.send(json.dumps(TEXT))
        server.begins(1)
        client.socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: server.engine.of_type(Abort))


BAD_FRAMES = {
    "not masked": (b"\x81\x01a", 1002, "invalid"),
    "reserved opcode": (b"\x83\x80\x00\x00\x00\x00", 1002, "invalid"),
    "not UTF-8": (b"\x81\x81\x00\x00\x00\x00\xff", 1007, "invalid"),
    "too big": (
        b"\x82\xff" + (MAX_BYTES + 1).to_bytes(8, "big") + bytes(5 + MAX_BYTES),
        1009,
        "too_large",
    ),
    "never complete": (PART, 1008, "slow"),
}


@pytest.mark.parametrize(("frame", "code", "reason"), BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_bad_frame_closes_the_socket_after_the_messages_before_it(
    server: Server, frame: bytes, code: int, reason: str
) -> None:
    server.engine.script = stalls()
    with server.open() as client:
        client.send(json.dumps(TEXT))
        (submit,) = server.begins(1)
        client.socket.sendall(frame)
        server.finish(submit, [65, EOS])
        assert answer(client)["generated_text"] == "b"
        assert close_code(client) == code
    wait_until(lambda: Refused({reason: 1}) in server.engine.of_type(Refused))


def test_a_message_without_room_in_memory_is_refused(server: Server) -> None:
    long = {"inputs": "Q", "parameters": {"stop": ["x" * 900] * 16}, "extra": None}
    padded = json.dumps(long) + " " * (MAX_BYTES // 2)
    server.engine.script = stalls()
    with server.open() as first, server.open() as second:
        first.send(padded)
        (submit,) = server.begins(1)
        second.send([padded[:1000], padded[1000:]])
        error = answer(second)
        assert error["code"] == 503
        assert "option.max_body_memory" in error["error"]
        server.finish(submit, [65, EOS])
        assert answer(first)["generated_text"] == "b"
        server.engine.script = says([66, EOS])
        second.send(padded)
        assert answer(second)["generated_text"] == "c"


def test_every_message_counts_against_the_limits_of_the_key(server: Server) -> None:
    with server.open(LIMITED) as client:
        assert ask(client, TEXT)["generated_text"] == "Hi there"
        assert ask(client, TEXT)["generated_text"] == "Hi there"
        error = ask(client, TEXT)
        assert error["code"] == 429
        assert "requests_per_minute=3" in error["error"]
        assert client.ping().wait(HANG_S)


def test_an_upgrade_needs_the_api_key(server: Server) -> None:
    with pytest.raises(InvalidStatus) as refused, server.open({}):
        pass
    assert refused.value.response.status_code == 401


def test_other_requests_are_refused(server: Server) -> None:
    def status(without: str = "", **changes: str) -> int:
        headers = {name: value for name, value in UPGRADE.items() if name != without} | changes
        got, answered, body = server.request("GET", f"{PATH}?a=b", **headers)
        assert json.loads(body)["code"] == got
        if got == 426:
            assert (answered["Upgrade"], answered["Sec-WebSocket-Version"]) == ("websocket", "13")
        return got

    assert [status(name) for name in UPGRADE] == [426, 426, 426, 400]
    assert status(**{"Sec-WebSocket-Version": "8"}) == 426
    assert status(**{"Sec-WebSocket-Key": "too short"}) == 400
    assert status(**{"Content-Length": "1"}) == 400
    assert status(Origin="https://another.example") == 403
    assert server.request("POST", PATH, TEXT)[0] == 405


def test_a_page_of_the_same_origin_may_connect(server: Server) -> None:
    with server.open(origin=f"http://127.0.0.1:{server.port}") as client:  # type: ignore[arg-type]
        assert ask(client, TEXT)["generated_text"] == "Hi there"


def test_frames_behind_the_upgrade_request_are_read(server: Server) -> None:
    """A client should not send frames before the response, but such frames are not lost."""
    head = [f"GET {PATH} HTTP/1.1", "Host: x"]
    head += [f"{name}: {value}" for name, value in {**KEY, **UPGRADE}.items()]
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as client:
        client.sendall("\r\n".join([*head, "", ""]).encode() + b"\x89\x80\x00\x00\x00\x00")
        received = b""
        while not received.endswith(b"\r\n\r\n\x8a\x00"):
            piece = client.recv(4096)
            assert piece, received
            received += piece
        assert received.startswith(b"HTTP/1.1 101 ")
        assert b"ICX+Yqv66kxgM0FcWaLWlFLwTAI=" in received, "the answer to the key, by RFC 6455"


def test_shutdown_ends_the_running_request_and_closes_the_sockets(
    tmp_path: Path, tokenizer_dir: Path, engine: FakeEngine, endpoint: str, caller: Caller
) -> None:
    """A message that waits behind the running one is not answered. The log has a line for each
    upgrade and for the message that is answered."""
    engine.script = stalls(after=[65])
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port, log_requests="true")
    program = ["-c", with_time_to_stop(10 * HANG_S, launch)]
    server = Server(caller.port, engine)
    with running(program) as process:
        wait_until(caller.is_healthy)
        with server.open() as idle, server.open() as busy:
            busy.send(json.dumps({**TEXT, "stream": True}))
            assert answer(busy)["generated_text"] is None
            busy.send(json.dumps(TEXT))
            (submit,) = server.begins(1)
            process.send_signal(signal.SIGTERM)
            assert close_code(idle) == 1001
            server.finish(submit, [66, EOS])
            assert answer(busy)["token"]["text"] == "c"
            assert answer(busy)["generated_text"] == "bc"
            assert close_code(busy) == 1001
        assert process.wait(HANG_S) == 0
        _, log = process.communicate()
    assert log.count(f"path={PATH} status=101") == 2
    assert log.count("method=POST path=/invocations status=200") == 1


def test_requests_that_do_not_end_before_the_shutdown_get_an_error(
    tmp_path: Path, tokenizer_dir: Path, engine: FakeEngine, endpoint: str, caller: Caller
) -> None:
    engine.script = stalls()
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port)
    server = Server(caller.port, engine)
    with running(["-c", with_time_to_stop(2, launch)]) as process:
        wait_until(caller.is_healthy)
        with server.open() as client:
            client.send(json.dumps(TEXT))
            server.begins(1)
            process.send_signal(signal.SIGTERM)
            error = answer(client)
            assert (error["code"], error["error"]) == (424, "the server is stopping")
            assert close_code(client) == 1001
        assert process.wait(HANG_S) == 0


def test_idle_sockets_make_room_for_others_and_are_closed_in_the_end(
    tmp_path: Path, tokenizer_dir: Path, engine: FakeEngine, endpoint: str, caller: Caller
) -> None:
    launch = write_launch(tmp_path, tokenizer_dir, endpoint, caller.port, max_connections=2)
    program = (
        "import dataclasses, core.configuration.limits as limits; "
        "limits.SOCKET_IDLE = dataclasses.replace(limits.SOCKET_IDLE, maximum=2); "
        f"import container.front_end.start as start; start.main('{os.getpid()}', {str(launch)!r})"
    )
    server = Server(caller.port, engine)
    with running(["-c", program]):
        wait_until(caller.is_healthy)
        with server.open() as first, server.open() as second, server.open() as third:
            assert close_code(first) == 1001
            time.sleep(0.3)
            pinged = time.monotonic()
            assert third.ping().wait(HANG_S)
            assert close_code(second) == 1008
            assert close_code(third) == 1008
            assert time.monotonic() - pinged >= 2
