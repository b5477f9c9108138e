"""A container with ranks on two machines, which are network namespaces with their own addresses."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from container.launch.children import Child
from deploy.fleet.container_process import COMMAND, ContainerProcess, child_arguments
from deploy.fleet.exchange import exchange, fetch
from deploy.fleet.http_message import Head, HttpRequest
from engine import LLM, SamplingParams
from tests.container.processes import HANG_S, ROOT, descendants, is_gone, wait_until

ADDRESS = "10.99.0.1:29400"
NOTICED_S = 15.0
"""The ranks notice a cut after up to 4 s of silence, and the engine takes a second to end. The rest
is for busy machines. gloo itself would wait for half an hour."""
SPLIT = "option.nodes=2\noption.tensor_parallel_degree=2\noption.device=cpu\noption.dtype=fp32\n"


class Machines(NamedTuple):
    first: str
    second: str
    link: str
    """The network interface of the second machine."""

    def command(self, machine: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", machine, *COMMAND)

    def cut(self) -> None:
        """Cut the network between the machines. Neither learns that a connection has ended."""
        ip("-n", self.second, "link", "set", self.link, "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    names = [f"longshore{os.getpid()}{end}" for end in "ab"]
    links = [f"ls{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    try:
        peer = ("peer", "name", links[1], "netns", names[1])
        ip("link", "add", links[0], "netns", names[0], "type", "veth", *peer)
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield Machines(*names, links[1])
    finally:
        for name in names:
            ip("netns", "del", name)


def post(parameters: dict[str, object], *, stream: bool = False) -> HttpRequest:
    body = json.dumps({"inputs": "ROMEO:", "parameters": parameters, "stream": stream}).encode()
    return HttpRequest("POST", b"/invocations", ((b"host", b"here"),), body)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(240)
def test_two_machines_answer_as_one_and_a_cut_between_them_is_noticed(
    machines: Machines, tmp_path: Path
) -> None:
    properties, model = tmp_path / "serving.properties", ROOT / "models" / "demo"
    properties.write_text(f"option.model_id={model}\n{SPLIT}")
    with LLM(model, dtype="fp32", device="cpu") as llm:
        [expected] = llm.generate(["ROMEO:"], SamplingParams(temperature=0, max_tokens=8))
    short = post({"max_new_tokens": 8})
    long = post({"max_new_tokens": 900, "min_new_tokens": 900}, stream=True)

    async def run() -> None:
        joining = Child(
            "ranks",
            [*machines.command(machines.second), "follow",
             *child_arguments(properties, 1.0, 2, ADDRESS), "1"],
        )  # fmt: skip
        container = ContainerProcess(properties, 1.0, 2, ADDRESS, machines.command(machines.first))
        try:
            await container.wait_until_ready()
            answer = json.loads((await fetch(container.socket, short))[1])
            assert answer["generated_text"] == expected.outputs[0].text
            [rank] = [pid for pid in descendants(os.getpid()) if b"--parent" in command_line(pid)]
            parts = exchange(container.socket, long)
            head = await anext(parts)
            assert isinstance(head, Head)
            assert head.status == 200
            await anext(parts)
            machines.cut()
            began = time.monotonic()
            *_, last = [part async for part in parts]
            assert isinstance(last, bytes)
            assert b"the engine has ended" in last, "rank 0 hangs in gloo, so only the log says why"
            assert time.monotonic() - began < NOTICED_S
            wait_until(lambda: container.has_ended)
            wait_until(lambda: is_gone(rank), NOTICED_S + HANG_S)
        finally:
            joining.kill()
            await container.stop()

    asyncio.run(run())
