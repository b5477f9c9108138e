"""The addresses at which a server listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from container.__main__ import main
from container.launch.ports import bind_port, client_address, listen, require_free_port
from core.errors import ConfigurationError
from tests.container.processes import free_port


def has_ipv6() -> bool:
    """Return whether this machine has the address ::1."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="the machine has no IPv6")


def reaches(port: int, address: str) -> bool:
    try:
        with socket.create_connection((address, port), timeout=5):
            return True
    except OSError:
        return False


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("", {"127.0.0.1", "::1"}),
        ("::", {"127.0.0.1", "::1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("::1", {"::1"}),
    ],
)
def test_hosts(host: str, reached: set[str]) -> None:
    port = free_port()
    with listen(port, host):
        assert {address for address in ("127.0.0.1", "::1") if reaches(port, address)} == reached
        with pytest.raises(ConfigurationError, match=rf"port {port}: Address already in use"):
            require_free_port(port, host)


def test_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(family: socket.AddressFamily, *arguments: object) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError("Address family not supported by protocol")
        return create(family, *arguments)  # type: ignore[arg-type]

    create = socket.socket
    port = free_port()
    monkeypatch.setattr(socket, "socket", refuse)
    with listen(port):
        assert reaches(port, "127.0.0.1")


@pytest.mark.parametrize("host", ["localhost", "[::1]", "10.0.0", "::1/64"])
def test_a_host_that_is_no_address(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--host .*: expected an IP address"):
        require_free_port(8080, host)


@needs_ipv6
def test_the_flag(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is taken at ::1, but free at 127.0.0.1."""
    served: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "container.launch.supervisor.supervise",
        lambda configuration, prepared, port, *, host: served.append((port, host)) or 0,
    )
    with listen(port := free_port(), "::1"):
        command = ["serve", str(tokenizer_dir), "--port", str(port), "--host"]
        assert main([*command, "::1"]) == 2
        assert main([*command, "127.0.0.1"]) == 0
    assert served == [(port, "127.0.0.1")]


def test_a_host_of_another_machine() -> None:
    with pytest.raises(ConfigurationError, match=r"--host 192\.0\.2\.1, port 8080: Cannot assign"):
        bind_port(8080, "192.0.2.1")


@pytest.mark.parametrize(
    ("address", "plain"),
    [
        (("::ffff:10.0.0.1", 80, 0, 0), ("10.0.0.1", 80)),
        (("::1", 80, 0, 0), ("::1", 80, 0, 0)),
        (("10.0.0.1", 80), ("10.0.0.1", 80)),
        ((), ()),
        ("", ""),
    ],
)
def test_clients_of_ipv4_have_addresses_of_ipv4(address: object, plain: object) -> None:
    assert client_address(address) == plain  # type: ignore[arg-type]
