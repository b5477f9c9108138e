"""One client must not harm its neighbours: a real container, and clients that misbehave."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from websockets.sync.client import connect as web_socket

from container.apis.invocations.upgrade import PATH
from core.configuration import limits
from tests.container.processes import HANG_S, wait_until
from tests.e2e.serving import LONG_ANSWER, long_winded, serve

PROPERTIES = """
option.header_timeout=5
option.body_timeout=5
option.write_timeout=5
option.max_connections=8
option.job_queue_tokens=40
option.max_rolling_batch_size=1
option.overload_status=429
"""
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
HEALTH_PATHS = ("/ping", "/health", "/health/live", "/health/ready")
HEAD = b"POST /invocations HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harm")
    with serve(folder, PROPERTIES, model=long_winded(folder)) as container:
        yield container
        assert "Traceback" not in container.log


def connect(container):
    return socket.create_connection(("127.0.0.1", container.port), timeout=HANG_S)


def exchange(container, data):
    """Send raw bytes; return everything that comes until the server closes the connection."""
    with connect(container) as client:
        client.sendall(data)
        received = b""
        while piece := client.recv(65536):
            received += piece
    return received


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "TLS": (b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03", 400),
    "slow health check": (b"GET /ping HTT", 408),
    "slow head": (b"POST /invocations HTT", 408),
    "slow body": (HEAD + b"Content-Length: 99\r\n\r\n{", 408),
    "no chunk": (CHUNKED + b"ffff\r\nabc", 408),
    "bad size": (CHUNKED + b"zz\r\nabc", 400),
    "negative size": (CHUNKED + b"-5\r\nabc", 400),
    "tiny chunks": (CHUNKED + b"1\r\na\r\n" * 20000, 400),
}


def test_broken_requests_are_answered_closed_and_counted(container):
    """Six requests are sent at a time, as each takes seconds and eight connections are allowed."""
    refused = "longshore:requests_refused_total"
    before = container.metric(refused)
    with ThreadPoolExecutor(6) as pool:
        sent = {name: pool.submit(exchange, container, data) for name, (data, _) in BROKEN.items()}
    for name, (_, status) in BROKEN.items():
        head, _, body = sent[name].result().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), name
        assert json.loads(body)["code"] == status
    assert exchange(container, b"GET\r\n\r\n")[9:12] == b"400", "gunicorn itself answers"
    wait_until(lambda: container.metric(refused) == before + len(BROKEN) + 1)


def test_bodies_beyond_the_limits_are_refused_and_the_next_request_is_answered(container):
    size = limits.JSON_VALUES.maximum
    bodies = {
        b'{"inputs": [' + b"1," * 8 * size + b"1]}": "application/json",
        b'{"inputs": ["' + b"hello world " * size + b'"]}': "application/json",
        b"inputs\n" + b"," * (limits.CSV_BYTES.maximum - 9): "text/csv",
        b"hello world " * size: "text/plain",
    }
    for body, kind in bodies.items():
        status, answer = container.request("POST", "/invocations", body, **{"Content-Type": kind})
        assert status == 400, answer
        assert container.invoke("Once", max_new_tokens=2)["generated_text"]


def test_open_connections_are_limited_but_the_health_is_answered(container):
    idle = [connect(container) for _ in range(20)]
    try:
        for path in HEALTH_PATHS:
            assert container.request("GET", path)[0] == 200
        assert container.invoke("Once", max_new_tokens=2)
        # The connections that have been idle longest are closed to make room.
        wait_until(lambda: sum(map(_is_closed, idle)) >= len(idle) - 8)
    finally:
        for client in idle:
            client.close()


def _is_closed(client):
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("is_web_socket", [False, True])
def test_a_client_that_does_not_read_is_cut_off_and_its_blocks_are_freed(container, is_web_socket):
    """The answer to the client has more bytes than the socket buffers of both sides hold."""
    parameters = {"max_new_tokens": LONG_ANSWER, "ignore_eos_token": True, "top_n_tokens": 20,
                  "details": True}  # fmt: skip
    body = json.dumps({"inputs": "Once", "stream": True, "parameters": parameters}).encode()
    num_before = container.log.count("event=cut_off")
    with socket.socket() as client, ExitStack() as stack:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", container.port))
        if is_web_socket:
            url = f"ws://127.0.0.1:{container.port}{PATH}"
            opened = web_socket(url, sock=client, proxy=None, max_queue=1, close_timeout=0.1)
            stack.enter_context(opened).send(body)
        else:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: container.log.count("event=cut_off") > num_before)
        wait_until(lambda: container.metric("longshore:kv_blocks_held") == 0)


def test_a_queue_full_of_tokens_answers_429(container):
    long = "Once upon a time " * 20
    parameters = {"max_new_tokens": 5000, "ignore_eos_token": True}
    body = json.dumps({"inputs": long, "parameters": parameters}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connect(container) as first, connect(container) as second:
        first.sendall(request)
        wait_until(lambda: container.metric(RUNNING) == 1)
        # This request waits. One of any size may wait if it is the only one in the queue.
        second.sendall(request)
        wait_until(lambda: container.metrics(RUNNING, WAITING) == [1, 1])
        answer = container.invoke("Once", status=429)
        assert "option.job_queue_tokens" in answer["error"]
    wait_until(lambda: container.metrics(RUNNING, WAITING) == [0, 0])
    assert container.invoke("Once", max_new_tokens=2)
