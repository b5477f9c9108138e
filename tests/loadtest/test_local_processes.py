"""The processes of a server that already runs are found by its port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import psutil
import pytest

from loadtest.servers import local_processes
from loadtest.servers.local_processes import server_processes

SERVER = """
import socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", 0))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""
LAUNCHER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {SERVER!r}])
"""


@contextmanager
def started(command: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    """Run a command that prints its server's port. Yield the command's process and the address."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        root = psutil.Process(process.pid)
        try:
            yield root, f"http://localhost:{int(process.stdout.readline())}"
        finally:
            for member in (*root.children(recursive=True), root):
                member.kill()


def test_the_listener_its_workers_and_its_launcher_are_found_but_no_shell(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    with started(["sh", "-c", f"{sys.executable} {script}; true"]) as (shell, url):
        found = {process.pid for process in server_processes(url)}
        assert found == {process.pid for process in shell.children(recursive=True)}
        assert len(found) == 3


def test_this_process_and_those_that_started_it_are_not_the_servers() -> None:
    with started([sys.executable, "-c", SERVER]) as (server, url):
        found = {process.pid for process in server_processes(url)}
        assert found == {server.pid, *(child.pid for child in server.children())}
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as ours:
        assert server_processes(f"http://127.0.0.1:{ours.server_port}") == []


@pytest.mark.parametrize("url", ["http://192.0.2.1:80", "http://nowhere.invalid", "http://[::1]:1"])
def test_other_machines_and_free_ports_have_no_known_processes(url: str) -> None:
    assert server_processes(url) == []


def test_forwarders_are_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with started([sys.executable, "-c", SERVER]) as (server, url):
        monkeypatch.setattr(local_processes, "FORWARDERS", {server.name()})
        assert server_processes(url) == []
