"""HTTPS: the certificate's files, and a front end that serves with them."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import os
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.sync.client import connect

from container.apis.invocations.upgrade import PATH
from container.front_end.connections import EXTRA_CONNECTIONS
from container.security.tls import tls_context
from core.configuration.options import ServerOptions, make_options
from core.errors import ConfigurationError
from core.protocol.launch import Launch
from core.protocol.messages import Abort, Submit
from tests.container.fake_engine import FakeEngine, stalls
from tests.container.processes import HANG_S, free_port, running, running_alone, wait_until

MAX_CONNECTIONS = 16


def write_certificate(folder: Path, name: str, password: bytes | None = None) -> tuple[str, str]:
    """Write a certificate for localhost and its key, and return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    encryption = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
    return str(paths[0]), str(paths[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_certificate(tmp_path_factory.mktemp("tls"), "server")


class TlsCaller:
    """An HTTPS client that trusts only the test's certificate."""

    def __init__(self, port: int, certificate: str) -> None:
        self.port = port
        self.context = ssl.create_default_context(cafile=certificate)

    def request(self, method: str, path: str, body: object = None, **headers: str) -> tuple:
        connection = http.client.HTTPSConnection(
            "localhost", self.port, context=self.context, timeout=HANG_S
        )
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        try:
            return self.request("GET", "/ping")[0] == 200
        except OSError:
            return False

    def connect(self) -> ssl.SSLSocket:
        raw = socket.create_connection(("localhost", self.port), timeout=HANG_S)
        return self.context.wrap_socket(raw, server_hostname="localhost")

    def open(self, body: object) -> ssl.SSLSocket:
        """Send a request without waiting for the response."""
        data = json.dumps(body).encode()
        connection = self.connect()
        head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


def answer_without_tls(port: int) -> bytes:
    with socket.create_connection(("localhost", port), timeout=HANG_S) as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            return connection.recv(100)
        except ConnectionResetError:
            return b""


@pytest.fixture
def caller(files: tuple[str, str]) -> TlsCaller:
    return TlsCaller(free_port(), files[0])


@pytest.fixture
def launch(
    tmp_path: Path,
    tokenizer_dir: Path,
    engine: FakeEngine,
    endpoint: str,
    caller: TlsCaller,
    files: tuple[str, str],
) -> Path:
    options = make_options(
        {
            "http_workers": 1,
            "max_connections": MAX_CONNECTIONS,
            "ssl_certfile": files[0],
            "ssl_keyfile": files[1],
        }
    )
    launch = Launch(
        model_dir=str(tokenizer_dir), endpoint=endpoint, port=caller.port, options=options
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    return path


@pytest.fixture
def front_end(launch: Path, caller: TlsCaller) -> Iterator[subprocess.Popen[str]]:
    with running(["-m", "container.front_end.start", str(os.getpid()), str(launch)]) as process:
        wait_until(caller.is_healthy)
        yield process


def test_requests_and_streams(front_end: subprocess.Popen[str], caller: TlsCaller) -> None:
    assert caller.request("POST", "/invocations", {"inputs": "Q"}) == (
        200,
        b'{"generated_text":"Hi there"}\n',
    )
    status, body = caller.request("POST", "/invocations", {"inputs": "Q", "stream": True})
    assert status == 200
    assert json.loads(body.splitlines()[-1])["generated_text"] == "Hi there"


def test_a_web_socket(
    front_end: subprocess.Popen[str], caller: TlsCaller, engine: FakeEngine
) -> None:
    """Frames are read while others are sent."""
    url = f"wss://localhost:{caller.port}{PATH}"
    stream = json.dumps({"inputs": "Q", "stream": True})
    with connect(url, ssl=caller.context, proxy=None) as client:
        for _ in range(4):
            client.send(stream)
        assert client.ping().wait(HANG_S)
        # Each answer has a record for each character, and one for the end token.
        records = [json.loads(client.recv(HANG_S)) for _ in range(4 * (len("Hi there") + 1))]
        assert [record["generated_text"] for record in records if record["generated_text"]] == (
            ["Hi there"] * 4
        )
        engine.script = stalls(after=[65])
        client.send(stream)
        assert json.loads(client.recv(HANG_S))["generated_text"] is None
    wait_until(lambda: engine.of_type(Abort))


def test_a_client_without_tls_is_disconnected_quietly(
    front_end: subprocess.Popen[str], caller: TlsCaller
) -> None:
    assert b"HTTP" not in answer_without_tls(caller.port)
    assert caller.is_healthy()
    front_end.terminate()
    _, errors = front_end.communicate(timeout=HANG_S)
    assert errors == ""


def test_silent_connections_make_room_for_others(
    front_end: subprocess.Popen[str], caller: TlsCaller
) -> None:
    """There are as many connections as the process accepts. None of them begins the handshake."""
    silent = [
        socket.create_connection(("localhost", caller.port), timeout=HANG_S)
        for _ in range(MAX_CONNECTIONS + EXTRA_CONNECTIONS)
    ]
    try:
        assert caller.is_healthy()
        assert caller.request("POST", "/invocations", {"inputs": "Q"})[0] == 200
        are_open = [_is_open(client) for client in silent]
        assert True in are_open, "room was made before all of them timed out"
        assert False in are_open
    finally:
        for client in silent:
            client.close()


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_handshake_has_a_time_limit(launch: Path, caller: TlsCaller) -> None:
    hasty = f"""
import container.front_end.start as front_end, container.security.tls as tls
tls.HANDSHAKE_S = 0.5
front_end.main('{os.getpid()}', {str(launch)!r})
"""
    with running(["-c", hasty]):
        wait_until(caller.is_healthy)
        with socket.create_connection(("localhost", caller.port), timeout=HANG_S) as client:
            client.sendall(b"\x16\x03\x01")  # the handshake begins and is never finished
            assert client.recv(1) == b"", "the connection is closed"


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_disconnect_aborts_the_request(
    front_end: subprocess.Popen[str], caller: TlsCaller, engine: FakeEngine, says_goodbye: bool
) -> None:
    """A client may send TLS's close notice before it disconnects. The notice arrives as data that
    the server does not read while it waits for the engine."""
    engine.script = stalls()
    connection = caller.open({"inputs": "Q"})
    wait_until(lambda: engine.of_type(Submit))
    if says_goodbye:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # if the server has not yet said goodbye, or is gone
            connection.unwrap()
    connection.close()
    wait_until(lambda: engine.of_type(Abort))


def hello() -> bytes:
    """Return the first bytes of a client's handshake."""
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


PLACES: dict[str, tuple[bytes, bool]] = {
    "before the handshake": (b"", False),
    "in the client's hello": (hello()[:100], False),
    "in the handshake": (hello(), False),
    "after the handshake": (b"", True),
    "in the head": (b"POST /invocations HTTP/1.1\r\nHo", True),
    "in the body": (b'POST /invocations HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"inp', True),
}
"""Where clients leave before their request is whole: what they have sent, and whether over TLS."""
MANNERS = ("closes", "says goodbye", "resets", "sends what is not TLS")


def leave(client: socket.socket, manner: str) -> None:
    if manner == "resets":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if manner == "sends what is not TLS":
        os.write(client.fileno(), b"nonsense, as long as the head of a record of TLS")
    if manner == "says goodbye" and isinstance(client, ssl.SSLSocket):
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.unwrap()
    client.close()


def test_clients_that_leave_at_any_place_harm_nobody(
    front_end: subprocess.Popen[str], caller: TlsCaller, engine: FakeEngine
) -> None:
    """The stream of another client goes on meanwhile."""
    engine.script = stalls(after=[65])
    with caller.open({"inputs": "Q", "stream": True}) as other:
        assert other.recv(1)
        for manner in MANNERS:
            for data, is_tls in PLACES.values():
                plain = socket.create_connection
                client = caller.connect() if is_tls else plain(("localhost", caller.port), HANG_S)
                client.sendall(data)
                leave(client, manner)
            assert caller.is_healthy()
            for body in ({"inputs": "Q"}, {"inputs": "Q", "stream": True}):
                submitted = len(engine.of_type(Submit))
                client = caller.open(body)
                wait_until(lambda seen=submitted: len(engine.of_type(Submit)) > seen)
                if "stream" in body:
                    assert client.recv(1)
                leave(client, manner)
        first, *left = engine.of_type(Submit)
        wait_until(lambda: len(engine.of_type(Abort)) >= len(left))
        assert {abort.id for abort in engine.of_type(Abort)} == {submit.id for submit in left}
        assert len(left) == 2 * len(MANNERS)
    wait_until(lambda: first.id in {abort.id for abort in engine.of_type(Abort)})
    front_end.terminate()
    _, errors = front_end.communicate(timeout=HANG_S)
    assert "Traceback" not in errors
    assert "event=failed" not in errors


def test_the_certificate_files_are_checked(tmp_path: Path, files: tuple[str, str]) -> None:
    certificate, key = files
    _, other_key = write_certificate(tmp_path, "other")
    _, locked_key = write_certificate(tmp_path, "locked", b"password")
    for given, message in (
        ((certificate, None), "option.ssl_keyfile is missing"),
        ((None, key), "option.ssl_certfile is missing"),
        (("/no/such.crt", key), "option.ssl_certfile=/no/such.crt: cannot be read: No such file"),
        ((certificate, "/no/such.key"), "option.ssl_keyfile=/no/such.key: cannot be read"),
        ((certificate, other_key), "cannot be used"),
        ((certificate, locked_key), "have no password"),
        ((key, certificate), "must be PEM files"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tls_context(ServerOptions(ssl_certfile=given[0], ssl_keyfile=given[1]))
    assert tls_context(ServerOptions()) is None
    assert tls_context(ServerOptions(ssl_certfile=certificate, ssl_keyfile=key)) is not None


def test_several_models_behind_one_certificate_and_one_file_of_keys(
    tmp_path: Path, short_dir: Path, caller: TlsCaller, files: tuple[str, str]
) -> None:
    """The front speaks TLS and checks the keys, whatever the path."""
    model = tmp_path / "models" / "a"
    model.mkdir(parents=True)
    (model / "serving.properties").touch()
    (model / "mode").write_text("well")
    (tmp_path / "keys").write_text("the-only-key\n")
    variables = {
        "OPTION_SSL_CERTFILE": files[0],
        "OPTION_SSL_KEYFILE": files[1],
        "OPTION_API_KEYS_FILE": str(tmp_path / "keys"),
        "OPTION_SOURCE_ROOTS": str(tmp_path),
    }
    key = {"Authorization": "Bearer the-only-key"}
    load = {"model_name": "a", "url": str(model)}
    command = ["-m", "tests.container.multi_model.run_models", str(caller.port)]
    with running_alone(command, short_dir, **variables) as process:
        wait_until(caller.is_healthy)
        assert caller.request("POST", "/models", load)[0] == 401
        assert caller.request("POST", "/models", load, **key)[0] == 200
        assert caller.request("POST", "/models/a/invoke", {"inputs": "Q"})[0] == 401
        assert caller.request("POST", "/models/a/invoke", {"inputs": "Q"}, **key)[0] == 201
        assert caller.request("GET", "/models/a/metrics")[0] == 401
        for manner in MANNERS:
            leaving = caller.connect()
            head = (
                f"POST /models/a/wait HTTP/1.1\r\nHost: x\r\nAuthorization: {key['Authorization']}"
            )
            leaving.sendall(f"{head}\r\nContent-Length: 0\r\n\r\n".encode())
            wait_until((model / "waits").exists)
            leave(leaving, manner)
            wait_until((model / "gone").exists)
            (model / "waits").unlink()
            (model / "gone").unlink()
        assert caller.request("GET", "/metrics", **key)[0] == 200
        assert b"HTTP" not in answer_without_tls(caller.port)
        process.terminate()
        output, errors = process.communicate(timeout=HANG_S)
    assert "the-only-key" not in output + errors
    assert "Traceback" not in errors
