"""The connection of a load test's user."""

from __future__ import annotations

import socket
import threading

import pytest

from loadtest.servers.clients.transport import HttpTransport, SendError

ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nyes\r\n0\r\n\r\n"
BODY = b"{}"


def test_a_connection_that_the_server_has_closed_is_opened_again():
    """As by llama.cpp's server, which closes after each stream. A new one is not tried twice."""

    def serve():
        for answer in (ANSWER, ANSWER, b""):
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as request:
                while request.readline() != b"\r\n":
                    pass
                request.read(len(BODY))  # or closing would reset the connection
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        transport = HttpTransport(f"http://127.0.0.1:{listener.getsockname()[1]}", 10)
        assert [transport.post("/", BODY) for _ in range(2)] == [b"yes", b"yes"]
        transport.close()
        with pytest.raises(SendError, match="RemoteDisconnected"):
            transport.post("/", BODY)
        server.join()
