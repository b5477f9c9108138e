"""Ranks as processes: they answer as one rank does, and end together."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.configuration.options import Options
from core.errors import ConfigurationError, EngineUnavailableError, InsufficientMemoryError
from core.plan import BlockMoves
from engine import LLM, SamplingParams
from engine.ranks import watch
from engine.ranks.followers import HERE, Followers, rank_variables, threads_for_ranks
from engine.ranks.order_types import FailureReport, Move
from engine.ranks.process_group import ProcessGroup
from engine.ranks.store import serve_store
from engine.ranks.watch import RankWatch
from engine.shard import Shard
from tests.container.processes import HANG_S, descendants, is_gone, wait_until
from tests.engine.greedy_answers import generate, prompts, tokens

CPU = torch.device("cpu")
RANK = """
import os, sys, time
from multiprocessing.connection import Connection
from engine.ranks.order_types import READY
from engine.ranks.store import open_store
from engine.ranks.watch import Beats

address, rank, _, _, fd = sys.argv[1:]
orders, store = Connection(int(fd)), open_store(address)
beats = Beats(store, int(rank))
store.add(READY, 1)
try:
    orders.recv_bytes()
except EOFError:
    os._exit(0)
beats.stop('%s')
time.sleep(60)
"""
"""A rank without a model: it fails at its first order."""
WORDS = FailureReport("configuration", "the KV cache does not fit").encode()
BROKEN = RANK % WORDS
FULL = """
import sys, types
from engine import follow

def fail(*_):
    raise MemoryError("tried to allocate 2 GiB")

fake = types.SimpleNamespace(build_parts=fail, load=fail)
for name in ("build", "builders.packed"):
    sys.modules[f"engine.{name}"] = fake
sys.exit(follow.main())
"""
"""A rank with too little memory for its part of the model."""


class Group:
    """Rank 0's view of processes without models."""

    def __init__(self, size, script=BROKEN):
        self.lost = threading.Event()
        self.error = None
        command = (sys.executable, "-c", script)
        args = (Path("model"), Options(), size, CPU, self._on_lost)
        self.followers = Followers(*args, command=command)
        self.followers.wait()

    def _on_lost(self, error):
        self.error = error
        self.lost.set()

    def wait_for_the_end(self):
        assert self.lost.wait(HANG_S)
        wait_until(lambda: all(is_gone(pid) for pid in self.followers.pids))


@pytest.fixture
def group():
    group = Group(3)
    yield group
    group.followers.close()
    assert all(is_gone(pid) for pid in group.followers.pids)


@pytest.mark.parametrize(
    ("signum", "reason"),
    [
        (signal.SIGKILL, "rank 2 ended with exit code -9"),
        (signal.SIGSTOP, "rank 2 stopped answering"),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_others(group, signum, reason, caplog):
    os.kill(group.followers.pids[1], signum)
    group.wait_for_the_end()
    assert str(group.error) == reason
    assert caplog.messages == [reason]
    error = group.followers.cause_of(RuntimeError("Connection closed by peer"))
    assert isinstance(error, EngineUnavailableError)
    assert str(error) == reason
    with pytest.raises(EngineUnavailableError, match=reason):
        group.followers.send(Move(BlockMoves()))


def test_a_rank_that_fails_says_why(group):
    with contextlib.suppress(ConfigurationError):  # rank 1 may end before rank 2 gets the order
        group.followers.send(Move(BlockMoves()))
    group.wait_for_the_end()
    assert str(group.error).endswith("the KV cache does not fit")
    error = group.followers.cause_of(RuntimeError("Connection closed by peer"))
    assert isinstance(error, ConfigurationError), "the engine must not be started again"


@pytest.mark.parametrize("culprit_ends", [True, False])
def test_a_rank_that_ends_without_a_report_is_why_another_fails(culprit_ends, monkeypatch):
    """The silent rank counts as the cause even if the other's failure report arrives first."""
    monkeypatch.setattr(watch, "TICK_S", 0.01)
    looks = iter([None, -9 if culprit_ends else None])
    processes = {2: SimpleNamespace(poll=lambda: next(looks))}
    lost, store = queue.SimpleQueue(), serve_store(HERE)
    store.set("report/1", WORDS)
    watching = RankWatch(store, 3, processes, lambda rank, words: lost.put((rank, words)))
    assert lost.get(timeout=HANG_S) == ((2, b"") if culprit_ends else (1, WORDS.encode()))
    watching.stop()


def test_a_rank_without_enough_memory_for_its_part_says_so():
    group = Group(2, FULL)
    joined = ProcessGroup(Shard(0, 2), CPU, group.followers.address, HANG_S)
    group.wait_for_the_end()
    joined.close()
    group.followers.close()
    assert isinstance(group.error, InsufficientMemoryError)
    reason = "rank 1: out of memory while loading the model: tried to allocate 2 GiB"
    assert str(group.error) == reason


def test_a_rank_whose_code_exits_says_why():
    group = Group(2, FULL.replace("MemoryError(", "SystemExit("))
    joined = ProcessGroup(Shard(0, 2), CPU, group.followers.address, HANG_S)
    group.wait_for_the_end()
    joined.close()
    group.followers.close()
    assert str(group.error) == "rank 1: SystemExit: tried to allocate 2 GiB"


def test_ranks_that_are_closed_end_quietly(group):
    group.followers.close()
    assert not group.lost.is_set()


def test_an_error_of_rank_0_alone_ends_the_group():
    group = Group(1)
    error = group.followers.cause_of(RuntimeError("out of memory"))
    assert isinstance(error, EngineUnavailableError)
    assert str(error) == "rank 0 failed: RuntimeError: out of memory"
    group.followers.close()


def test_variables_of_a_rank():
    cuda = torch.device("cuda")
    assert rank_variables(2, cuda, {})["CUDA_VISIBLE_DEVICES"] == "2"
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,7"}
    assert rank_variables(2, cuda, visible)["CUDA_VISIBLE_DEVICES"] == "7"
    assert "OMP_NUM_THREADS" not in rank_variables(1, CPU, {"OMP_NUM_THREADS": "3"})


def test_ranks_on_a_cpu_share_its_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(6)
    with threads_for_ranks(3, CPU):
        assert torch.get_num_threads() == 2
        assert rank_variables(1, CPU, {})["OMP_NUM_THREADS"] == "2"
    assert torch.get_num_threads() == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # the user's number applies to each process
    with threads_for_ranks(3, CPU):
        assert torch.get_num_threads() == 6
    torch.set_num_threads(before)


def test_an_engine_on_two_processes(tiny_model):
    path = tiny_model("llama")
    options = {"dtype": "fp32", "block_size": 4, "num_kv_blocks": 40, "async_scheduling": True}
    with LLM(path, tensor_parallel_size=2, **options) as llm:
        assert llm.facts.num_ranks == 2
        assert tokens(llm) == generate(path)
        with pytest.raises(ConfigurationError, match="close that LLM first"):
            LLM(path, tensor_parallel_size=2, **options)
        assert tokens(llm) == generate(path)
        kill_rank_1(llm)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_two_gpus(tiny_model):
    path = tiny_model("llama", is_wide=True)
    with LLM(path, tensor_parallel_size=2, dtype="fp32", num_kv_blocks=40) as llm:
        assert llm.facts.device == "cuda"
        assert tokens(llm) == generate(path)


def kill_rank_1(llm):
    """Kill rank 1 while it answers."""
    [pid] = [child for child in descendants(os.getpid()) if "engine.follow" in command_of(child)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    stream = llm.stream(prompts(), params)
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match="rank 1 ended with exit code -9"):
        list(stream)


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
