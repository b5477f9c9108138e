"""Ranks on other nodes: here, processes that share nothing with rank 0 but the model's files."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch

from core.configuration.options import Options, make_options
from core.errors import ConfigurationError, EngineUnavailableError
from engine.build import build_engine
from engine.ranks.followers import Followers
from engine.ranks.order_types import FailureReport, RankLaunch
from engine.ranks.orders import FRAME_BYTES, RemoteOrders
from engine.ranks.store import OPEN, interface_towards, network_of, open_store, serve_store
from engine.shard import Shard
from tests.container.processes import HANG_S, ROOT, free_port, wait_until
from tests.engine.greedy_answers import generate, prompts
from tests.engine.ranks.engines import answers
from tests.engine.ranks.test_engines import GREEDY

CPU = torch.device("cpu")
IDLE = """
import sys
from engine.ranks.order_types import READY
from engine.ranks.orders import RemoteOrders
from engine.shard import Shard
from engine.ranks.store import open_store
from engine.ranks.watch import Beats

store = open_store(sys.argv[1])
beats = Beats(store, 1)
store.add(READY, 1)
RemoteOrders(sys.argv[1], Shard(1, 2), 2).receive()
"""
"""A rank without a model."""
STORE = """
import sys, time
from engine.ranks.store import serve_store

store = serve_store(sys.argv[1])
time.sleep(3600)
"""
"""Rank 0, of which only the store is needed."""


@pytest.fixture
def address():
    """Where the ranks of this test meet."""
    return f"127.0.0.1:{free_port()}"


@contextmanager
def started(*arguments):
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def rank_process(address, rank, path):
    arguments = (address, str(rank), str(path), "--parent", str(os.getpid()))
    return started("-m", "engine.follow", *arguments)


@pytest.mark.matrix(cases=0)
@pytest.mark.timeout(240)
def test_ranks_on_two_nodes_answer_as_one_rank_does_and_end_together(tiny_model, address):
    """Two of the four ranks are on another node. One of these two is killed."""
    path, lost = tiny_model("llama"), threading.Event()
    options = make_options({
        "dtype": "fp32", "block_size": 4, "num_kv_blocks": 40, "device": "cpu",
        "nodes": 2, "tensor_parallel_degree": 4,
    })  # fmt: skip
    with rank_process(address, 2, path) as killed, rank_process(address, 3, path) as other:
        engine = build_engine(path, options, on_lost=lambda _: lost.set(), rank_address=address)
        try:
            assert engine.facts.num_ranks == 4
            assert answers(engine, prompts(), GREEDY) == generate(path, eos_token_id=None)
            engine.add(prompts()[0], GREEDY, time.monotonic())
            engine.step(time.monotonic())
            killed.kill()
            with pytest.raises(EngineUnavailableError):
                run(engine)
            assert lost.wait(HANG_S)
        finally:
            engine.close()
        assert other.wait(HANG_S) in (0, 1)


def run(engine):
    while engine.has_work():
        engine.step(time.monotonic())


class Group:
    """Rank 0's view of one rank on another node."""

    def __init__(self, address, **options):
        self.lost = threading.Event()
        self.error = None
        options = make_options({"nodes": 2, **options})
        self.followers = Followers(Path("model"), options, 2, CPU, self._on_lost, address)

    def _on_lost(self, error):
        self.error = error
        self.lost.set()


@contextmanager
def group(address, **options):
    group = Group(address, **options)
    try:
        yield group
    finally:
        group.followers.close()


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_on_another_node_that_dies_or_stops_is_noticed(address, signum):
    with started("-c", IDLE, address) as process, group(address) as it:
        it.followers.wait()
        os.kill(process.pid, signum)
        assert it.lost.wait(HANG_S)
        assert str(it.error) == "rank 1 on another node ended or does not answer"


def test_a_rank_on_another_node_ends_with_rank_0(address):
    with started("-c", IDLE, address) as process:
        with group(address) as it:
            it.followers.wait()
        process.wait(HANG_S)
        assert not it.lost.is_set()


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_ends_if_the_node_of_rank_0_no_longer_answers(address, signum):
    with started("-c", STORE, address) as rank_0, started("-c", IDLE, address) as process:
        beats = open_store(address)
        wait_until(lambda: beats.add("beats/1", 0))
        os.kill(rank_0.pid, signum)
        process.wait(HANG_S)


def test_ranks_that_do_not_come_are_explained(address):
    expected = f"1 rank did not connect to rank 0 at {address} within 0.5 s; see their logs, and"
    with (
        group(address, model_loading_timeout=1) as it,
        pytest.raises(ConfigurationError, match=re.escape(expected)),
    ):
        it.followers.wait()


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(ConfigurationError, match=r"cannot listen at 203\.0\.113\.1:29400: .*"):
        Group("203.0.113.1:29400")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"version": "0.0"}, "rank 0 runs Longshore 0.0, but this rank"),
        ({"version": version("longshore"), "rank": 1}, "rank 0 runs Longshore of another build"),
        ({"rank": 1}, "rank 0 runs Longshore of another build"),
    ],
)
def test_a_launch_of_another_version_is_explained(message, reason):
    with pytest.raises(ConfigurationError, match=reason):
        RankLaunch.decode(msgspec.json.encode(message))


def test_a_failure_report_of_another_version_is_explained():
    error = FailureReport.decode_error(msgspec.json.encode({"kind": "new"}), 3)
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith("rank 3 runs another version of Longshore")


def test_a_rank_with_another_model_is_refused(tiny_model, address):
    """Rank 0's model is in the folder `model`, which has no files."""
    with (
        rank_process(address, 1, tiny_model("llama")),
        group(address) as it,
        pytest.raises(ConfigurationError, match="on this node differs from rank 0's"),
    ):
        it.followers.wait()


@pytest.mark.parametrize("length", [0, 50, FRAME_BYTES - 8, FRAME_BYTES - 7, 3 * FRAME_BYTES])
def test_orders_of_any_length_reach_the_ranks_on_all_other_nodes(length, address):
    """Rank 1 is on the node of rank 0, and gets its orders through a pipe."""
    message = os.urandom(length)
    store = serve_store(address)
    with ThreadPoolExecutor(5) as pool:
        members = pool.map(lambda rank: RemoteOrders(address, Shard(rank, 6), 3), (0, 2, 3, 4, 5))
        first, *others = members
        sending = pool.submit(first.send, message)
        assert list(pool.map(RemoteOrders.receive, others)) == [message] * 4
        sending.result()
    del store


def test_the_store_listens_at_the_address_of_rank_0_only(address):
    server = serve_store(address)
    store = open_store(address)
    store.set("key", "value")
    assert server.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port))


def test_a_child_of_rank_0_does_not_wait_for_a_store_that_has_ended(address):
    with pytest.raises(RuntimeError):
        open_store(address, OPEN / 300)


def test_gloo_and_nccl_use_exactly_the_interface_that_leads_to_rank_0(monkeypatch):
    monkeypatch.setattr("engine.ranks.store.interface_towards", lambda host: "eth1")
    for variable, value in (("GLOO_SOCKET_IFNAME", "eth1"), ("NCCL_SOCKET_IFNAME", "=eth1")):
        monkeypatch.delenv(variable, raising=False)
        with network_of("10.0.0.1:80"):
            assert os.environ[variable] == value
        assert variable not in os.environ
        monkeypatch.setenv(variable, "eth2")  # the user's choice
        with network_of("10.0.0.1:80"):
            assert os.environ[variable] == "eth2"


def test_on_one_machine_only_gloo_is_given_an_interface(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    followers = Followers(Path("model"), Options(), 1, CPU, print)
    followers.close()
    with network_of(followers.address):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_the_interface_towards_an_address():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("not an address") == ""
