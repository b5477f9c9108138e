"""One client must not harm its neighbours: a real container, and clients that misbehave."""

from __future__ import annotations

import json
import socket

import pytest

from core import limits
from tests.container.processes import wait_until
from tests.e2e.serving import serve

PROPERTIES = """
option.header_timeout=1
option.body_timeout=1
option.write_timeout=1
option.max_connections=8
option.job_queue_tokens=40
option.max_rolling_batch_size=1
option.overload_status=429
"""
HEALTH_PATHS = ("/ping", "/health", "/health/live", "/health/ready")
HEAD = b"POST /invocations HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("harm"), PROPERTIES) as container:
        yield container
        assert "Traceback" not in container.log


def connect(container):
    return socket.create_connection(("127.0.0.1", container.port), timeout=20)


def exchange(container, data):
    """Send raw bytes; return everything that comes until the server closes the connection."""
    with connect(container) as client:
        client.sendall(data)
        received = b""
        while piece := client.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03", 400),
        (b"POST /invocations HTT", 408),
        (HEAD + b"Content-Length: 99\r\n\r\n{", 408),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nffff\r\nabc", 408),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20000, 400),
    ],
    ids=["TLS", "slow head", "slow body", "no chunk", "bad size", "negative size", "tiny chunks"],
)
def test_requests_that_do_not_arrive_are_answered_and_closed(container, data, status):
    answer = exchange(container, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == status


def test_bodies_at_the_limits_are_refused_while_others_are_answered(container):
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
        closed = [client for client in idle if _is_closed(client)]
        assert len(closed) >= len(idle) - 8, "those idle for longest make room"
    finally:
        for client in idle:
            client.close()


def _is_closed(client):
    client.settimeout(0.2)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def test_a_client_that_does_not_read_is_cut_off_and_its_blocks_are_freed(container):
    """Its answer has more bytes than the buffers of both sides."""
    parameters = {"max_new_tokens": 900, "ignore_eos_token": True, "top_n_tokens": 20,
                  "details": True}  # fmt: skip
    body = json.dumps({"inputs": "Once", "stream": True, "parameters": parameters}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", container.port))
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: container.metric("vllm:num_requests_running") == 1)
        wait_until(lambda: "event=cut_off" in container.log)
        wait_until(lambda: container.metric("longshore:kv_blocks_held") == 0)


def test_a_queue_full_of_tokens_answers_429(container):
    long = "Once upon a time " * 20
    parameters = {"max_new_tokens": 900, "ignore_eos_token": True, "top_n_tokens": 20}
    body = json.dumps({"inputs": long, "stream": True, "parameters": parameters}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connect(container) as first, connect(container) as second:
        first.sendall(request)
        wait_until(lambda: container.metric("vllm:num_requests_running") == 1)
        second.sendall(request)  # waits, whatever its size, as it waits alone
        wait_until(lambda: container.metric("vllm:num_requests_waiting") == 1)
        answer = container.invoke("Once", status=429)
        assert "option.job_queue_tokens" in answer["error"]
    wait_until(lambda: container.metric("vllm:num_requests_running") == 0)
    assert container.invoke("Once", max_new_tokens=2)
