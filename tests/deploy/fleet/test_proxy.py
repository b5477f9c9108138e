"""Requests and responses through gateway and socket, and what the gateway answers itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.fleet.exchange import exchange, fetch
from deploy.fleet.front import gateway as gateway_module
from deploy.fleet.front.gateway import Gateway, Parts, Replicas
from deploy.fleet.http_message import Head, ReplicaLostError, Request
from tests.deploy.fleet.asgi import Exchange
from tests.deploy.fleet.fake_container import (
    CHUNKS,
    LAST_CHUNK,
    STREAM,
    FakeContainer,
    fake_container,
)

MAX_BODY_BYTES = 100
REFUSAL = (
    b"HTTP/1.1 424 Failed\r\nContent-Length: 2\r\nServer: gunicorn\r\nX-Request-Id: 7\r\n\r\nno"
)


async def nobody(request: Request) -> Sequence[tuple[str, Head, bytes]]:
    return []


def gateway(*exchanges: Callable[[Request], Parts]) -> Gateway:
    """Return a gateway whose tries use these exchanges in turn, and then always the last."""
    left = list(exchanges)

    def answer(request: Request) -> Parts:
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    return Gateway(Replicas(answer, nobody), MAX_BODY_BYTES)


def gateway_to(socket: Path) -> Gateway:
    return gateway(lambda request: exchange(socket, request))


async def ended(request: Request) -> Parts:
    raise ReplicaLostError("killed")
    yield


async def ended_after_the_head(request: Request) -> Parts:
    yield Head(200, ())
    raise ReplicaLostError("killed")


async def ended_after_a_piece(request: Request) -> Parts:
    yield Head(200, ())
    yield b"one"
    raise ReplicaLostError("killed")


async def fine(request: Request) -> Parts:
    yield Head(200, ((b"x-a", b"b"),))
    yield b"fine"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(gateway_module, "PING_TIMEOUT_S", 0.05)


@asynccontextmanager
async def streaming(
    socket: Path,
) -> AsyncGenerator[tuple[FakeContainer, Exchange, asyncio.Future[Exchange]]]:
    """Yield a container, a client that has the first piece of its stream, and the client's task.

    `may_go_on` lets the container send the rest.
    """
    async with fake_container(socket, STREAM, CHUNKS[0], CHUNKS[1] + LAST_CHUNK) as container:
        client = Exchange()
        running = asyncio.ensure_future(client.run(gateway_to(socket)))
        await client.wait_for_piece()
        yield container, client, running


def test_a_stream_passes_piece_by_piece_with_its_headers(short_dir: Path):
    async def run() -> None:
        async with streaming(short_dir / "s") as (container, client, running):
            assert client.pieces == [b"one"]
            assert not client.is_complete
            container.may_go_on.set()
            await running
        assert client.pieces == [b"one", b"two"]
        assert client.is_complete
        assert client.headers == [
            (b"Content-Type", b"text/event-stream"), (b"X-Twice", b"1"), (b"X-Twice", b"2"),
        ]  # fmt: skip

    asyncio.run(run())


def test_a_request_passes_with_its_headers_and_whole_body(short_dir: Path):
    async def run() -> bytes:
        async with fake_container(short_dir / "s", REFUSAL) as container:
            client = Exchange(
                path="/v1/a%20b",
                query=b"c=%C3%A9",
                headers=[
                    (b"host", b"here"),
                    (b"x-amzn-sagemaker-custom-attributes", b"a=1"),
                    (b"transfer-encoding", b"chunked"),
                    (b"x-request-id", b"serves-own"),
                ],
                body=[b"abc", b"def"],
            )
            await client.run(gateway_to(short_dir / "s"))
            return container.received[0]

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert body == b"abcdef"
    line, *headers = head.lower().split(b"\r\n")
    assert line == b"post /v1/a%20b?c=%c3%a9 http/1.1"
    assert set(headers) == {
        b"host: here", b"x-amzn-sagemaker-custom-attributes: a=1", b"content-length: 6",
        b"x-request-id: serves-own", b"x-amzn-sagemaker-inference-id: serves-own",
        b"connection: close",
    }  # fmt: skip


def test_a_request_of_http_1_0_needs_no_host(short_dir: Path):
    async def run() -> bytes:
        async with fake_container(short_dir / "s", REFUSAL) as container:
            await Exchange(headers=()).run(gateway_to(short_dir / "s"))
            return container.received[0]

    assert b"\r\nhost: container\r\n" in asyncio.run(run()).lower()


def test_errors_pass_unchanged_except_for_headers_that_serve_sets(short_dir: Path):
    async def run() -> Exchange:
        async with fake_container(short_dir / "s", REFUSAL):
            return await Exchange().run(gateway_to(short_dir / "s"))

    client = asyncio.run(run())
    assert (client.status, client.pieces) == (424, [b"no"])
    assert client.headers == [(b"Content-Length", b"2")]
    assert client.is_complete


def test_the_container_hears_that_the_client_has_left(short_dir: Path):
    async def run() -> None:
        async with streaming(short_dir / "s") as (container, client, running):
            client.disconnect()
            await running
            await asyncio.wait_for(container.has_hung_up.wait(), 60)
        assert not client.is_complete

    asyncio.run(run())


def test_a_request_whose_client_leaves_within_its_body_is_not_passed_on():
    async def run() -> Exchange:
        client = Exchange(body=())
        client.disconnect()
        return await client.run(gateway(fine))

    assert asyncio.run(run()).sent == []


@pytest.mark.parametrize("failing", [ended, ended_after_the_head])
def test_a_request_is_tried_again_while_nothing_was_sent(failing: Callable[[Request], Parts]):
    client = asyncio.run(Exchange().run(gateway(failing, failing, fine)))
    assert (client.status, client.pieces, client.is_complete) == (200, [b"fine"], True)


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
def test_in_the_end_there_is_one_error_in_the_format_of_the_path(path: str):
    client = asyncio.run(Exchange(path=path).run(gateway(ended)))
    assert client.status == 503
    assert (b"retry-after", b"1") in client.headers
    body = json.loads(b"".join(client.pieces))
    assert "try again" in str(body)
    inner = body["error"] if path.startswith("/v1/") else body
    assert inner["code"] == 503
    assert client.is_complete


def test_a_stream_that_is_cut_off_never_looks_complete():
    async def run() -> Exchange:
        client = Exchange()
        with pytest.raises(ReplicaLostError):
            await client.run(gateway(ended_after_a_piece, fine))
        return client

    client = asyncio.run(run())
    assert (client.pieces, client.is_complete) == ([b"one"], False)


def test_a_long_body_is_passed_on_up_to_one_byte_beyond_the_limit():
    bodies: list[bytes] = []

    async def keep(request: Request) -> Parts:
        bodies.append(request.body)
        yield Head(413, ())

    asyncio.run(Exchange(body=[b"x" * 80] * 3).run(gateway(keep)))
    assert bodies == [b"x" * (MAX_BODY_BYTES + 1)]


def test_ping_is_503_while_there_is_no_replica():
    async def never(request: Request) -> Parts:
        await asyncio.sleep(60)
        yield b""

    client = asyncio.run(Exchange("GET", "/ping").run(gateway(never)))
    assert client.status == 503
    assert b"no replica is ready" in client.pieces[0]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/adapters"), ("DELETE", "/adapters/sql"), ("POST", "/v1/unload_lora_adapter"),
     ("POST", "/models/demo/adapters"), ("POST", "/%61dapters")],
)  # fmt: skip
def test_adapters_are_not_loaded_into_one_replica_of_many(method: str, path: str):
    client = asyncio.run(Exchange(method, path).run(gateway(fine)))
    assert client.status == 501
    assert b"docs/models.md" in client.pieces[0]


def test_what_changes_no_adapter_passes():
    for method in ("GET", "HEAD", "OPTIONS"):
        assert asyncio.run(Exchange(method, "/adapters").run(gateway(fine))).status == 200


def test_metrics_are_those_of_all_replicas():
    page = b'# HELP queue Waiting.\n# TYPE queue gauge\nqueue{model_name="m"} %d.0\n'
    head = Head(200, ((b"content-type", b"text/plain"), (b"content-length", b"9")))

    async def two(request: Request) -> Sequence[tuple[str, Head, bytes]]:
        return [("a", head, page % 1), ("b", head, page % 2), ("c", Head(503, ()), b"starting")]

    application = Gateway(Replicas(fine, two), MAX_BODY_BYTES)
    client = asyncio.run(Exchange("GET", "/metrics").run(application))
    text = b"".join(client.pieces).decode()
    assert 'queue{model_name="m",replica="a"} 1.0' in text
    assert 'queue{model_name="m",replica="b"} 2.0' in text
    assert text.count("# TYPE queue gauge") == 1
    lengths = [value for name, value in client.headers if name == b"content-length"]
    assert lengths == [str(len(text)).encode()]


def test_metrics_without_a_key_are_refused_as_by_a_replica():
    async def refused(request: Request) -> Sequence[tuple[str, Head, bytes]]:
        return [("a", Head(401, ((b"www-authenticate", b"bearer"),)), b"key?")]

    application = Gateway(Replicas(fine, refused), MAX_BODY_BYTES)
    client = asyncio.run(Exchange("GET", "/metrics").run(application))
    assert (client.status, client.pieces) == (401, [b"key?"])
    assert (b"www-authenticate", b"bearer") in client.headers


def test_a_container_that_ends_within_its_response_is_lost(short_dir: Path):
    async def run() -> None:
        request = Request("GET", b"/ping", ((b"host", b"here"),), b"")
        with pytest.raises(ReplicaLostError):
            await fetch(short_dir / "none", request)
        async with fake_container(short_dir / "s", STREAM, CHUNKS[0]):
            parts = exchange(short_dir / "s", request)
            assert [await anext(parts), await anext(parts)][1] == b"one"
            with pytest.raises(ReplicaLostError):
                await anext(parts)

    asyncio.run(run())


def test_the_application_starts_and_stops_with_its_server():
    async def run() -> list[str]:
        incoming = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))
        sent: list[str] = []

        async def receive() -> dict:
            return next(incoming)

        async def send(message: dict) -> None:
            sent.append(message["type"])

        await gateway(fine)({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
