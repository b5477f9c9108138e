"""Ranks of other machines, which join over TCP: here, processes that share nothing with rank 0."""

from __future__ import annotations

import hmac
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch

from core.configuration.meeting_point import KEY_VARIABLE, MeetingPoint, meeting_point
from core.configuration.options import Options
from core.errors import ConfigurationError, EngineUnavailableError
from engine import LLM, SamplingParams
from engine.ranks import group as group_module
from engine.ranks import joining, tcp
from engine.ranks.followers import Followers
from engine.ranks.group import StoreServer, interface_for, open_store
from engine.ranks.joining import wait_for_ranks
from engine.ranks.messages import FailureReport, GroupAddress, RankLaunch
from engine.ranks.tcp import WrongKeyError, interface_of
from tests.container.processes import HANG_S, ROOT, descendants, free_port, is_gone, wait_until
from tests.engine.greedy_answers import generate, prompts, tokens

KEY = "a-key-of-the-tests"
PROOF_BYTES = 16 + 32 + 32 + 32 + 1
IDLE = """
import os, sys, time
from core.configuration.options import Options
from core.configuration.meeting_point import meeting_point
from engine.ranks.tcp import join
from engine.ranks.watch import Watch

orders, beats = join(meeting_point(Options(rank_address=sys.argv[1])), lambda reason: None)
orders.recv_bytes()
watch = Watch({0: beats}, lambda rank, words: os._exit(0))
orders.send_bytes(b"ready")
time.sleep(3600)
"""
"""A rank without a model."""


@pytest.fixture
def place(monkeypatch):
    """The address at which the ranks of this test meet."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return MeetingPoint("127.0.0.1", free_port(), KEY.encode())


@contextmanager
def started(*arguments, key=KEY):
    """A process that stands for another machine. Of rank 0's files, it has only the model's."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, KEY_VARIABLE: key},
        text=True,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        pids = [process.pid, *descendants(process.pid)]
        process.terminate()
        process.communicate(timeout=HANG_S)
        wait_until(lambda: all(map(is_gone, pids)))


def joining_machine(path, place, **options):
    """Start `longshore join`, which runs the ranks of this machine."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return started("-m", "container", "join", str(path), f"--rank-address={place}", *flags)


def rank_processes(pid):
    return [
        child
        for child in descendants(pid)
        if b"engine.follow" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@pytest.mark.timeout(240)
def test_joined_ranks_answer_as_one_rank_does_and_join_the_next_engine(tiny_model, place):
    """Two of the four ranks are on another machine. One of these two is killed."""
    path = tiny_model("llama")
    options = {
        "dtype": "fp32", "block_size": 4, "num_kv_blocks": 40, "device": "cpu",
        "nodes": 2, "rank_address": str(place),
    }  # fmt: skip
    split = {"nodes": 2, "device": "cpu", "tensor_parallel_degree": 4}
    with joining_machine(path, place, **split) as machine:
        with LLM(path, tensor_parallel_degree=4, **options) as llm:
            assert llm.facts.num_ranks == 4
            assert tokens(llm) == generate(path)
            lost, other = rank_processes(machine.pid)
            stream = llm.stream(prompts(), SamplingParams(max_tokens=30, ignore_eos=True))
            next(stream)
            os.kill(lost, signal.SIGKILL)
            with pytest.raises(EngineUnavailableError, match=r"rank [23] .*on 127\.0\.0\.1 ended"):
                list(stream)
            wait_until(lambda: is_gone(other))
        with LLM(path, tensor_parallel_degree=4, **options) as llm:
            assert tokens(llm) == generate(path)


class Group:
    """Rank 0's view of one joined rank without a model."""

    def __init__(self, place):
        self.lost = threading.Event()
        self.error = None
        options = Options(nodes=2, rank_address=str(place))
        cpu = torch.device("cpu")
        self.followers = Followers(Path("model"), options, 2, cpu, self._on_lost)

    def _on_lost(self, error):
        self.error = error
        self.lost.set()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_joined_rank_that_dies_or_stops_is_noticed(place, signum):
    with started("-c", IDLE, str(place)) as process:
        group = Group(place)
        try:
            group.followers.wait()
            os.kill(process.pid, signum)
            assert group.lost.wait(HANG_S)
            reason = "rank 1 on 127.0.0.1 ended, or its machine stopped answering"
            assert str(group.error) == reason
        finally:
            group.followers.close()
            os.kill(process.pid, signal.SIGCONT)


def test_a_joined_rank_ends_with_rank_0(place):
    with started("-c", IDLE, str(place)) as process:
        group = Group(place)
        group.followers.wait()
        group.followers.close()
        assert process.wait(HANG_S) == 0
        assert not group.lost.is_set()


class Waiting(threading.Thread):
    """Rank 0 while it waits for ranks to join."""

    def __init__(self, place, count, timeout_s=HANG_S):
        super().__init__(daemon=True)  # a failed test does not wait for the thread
        self.result = None
        self._arguments = place, count, timeout_s
        self.start()

    def run(self):
        try:
            self.result = wait_for_ranks(*self._arguments)
        except ConfigurationError as error:
            self.result = error

    def ranks(self):
        self.join(HANG_S)
        return self.result

    def close(self):
        for rank in self.ranks():
            rank.close()


def test_a_rank_with_another_key_is_refused_and_says_so(place, caplog):
    caplog.set_level("INFO")
    waiting = Waiting(place, 1)
    arguments = ("-m", "engine.follow", "--join", str(place), "model", str(os.getpid()))
    with started(*arguments, key="another-key-of-the-tests") as process:
        assert process.wait(HANG_S) == ConfigurationError.exit_code
        assert (
            f"rank 0 has another key; set {KEY_VARIABLE} to the same key" in process.stderr.read()
        )
    assert waiting.is_alive()
    with started(*arguments):
        assert [rank.host for rank in waiting.ranks()] == ["127.0.0.1"]
        waiting.close()
    reason = f"a rank has another key; set {KEY_VARIABLE} to the same key"
    refused = [message for message in caplog.messages if "refused" in message]
    assert refused == [f"refused a connection from 127.0.0.1: {reason}"]


def test_strangers_and_ranks_that_leave_do_not_count(place, caplog):
    caplog.set_level("INFO")
    waiting = Waiting(place, 2)
    wait_until(lambda: is_listening(place))
    with socket.create_connection((place.host, place.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        wait_until(lambda: any("another protocol" in message for message in caplog.messages))
    with started("-c", IDLE, str(place)) as leaving:
        wait_until(lambda: f"1 of 2 ranks have joined at {place}" in caplog.messages)
        leaving.kill()
        wait_until(lambda: any("left before" in message for message in caplog.messages))
    with started("-c", IDLE, str(place)), started("-c", IDLE, str(place)):
        assert len(waiting.ranks()) == 2
        waiting.close()


def test_silent_strangers_hold_up_no_rank(place, monkeypatch):
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 10 * HANG_S)
    waiting = Waiting(place, 1)
    wait_until(lambda: is_listening(place))
    with connected(place), connected(place), started("-c", IDLE, str(place)):
        assert len(waiting.ranks()) == 1
        waiting.close()


@contextmanager
def connected(place):
    with socket.create_connection((place.host, place.port), timeout=HANG_S) as end:
        yield end


def proof_for(end, nonce=bytes(32), role=b"a rank"):
    """Read rank 0's greeting, and return the bytes that prove to it that this end has the key."""
    greeting = end.recv(48, socket.MSG_WAITALL)
    digest = hmac.digest(KEY.encode(), role + nonce + greeting[16:], "sha256")
    return b"longshore rank 1" + nonce + digest + bytes(32) + b"\1"


def test_a_handshake_has_one_deadline_however_the_bytes_come(place, monkeypatch):
    """The deadline also holds for a peer that knows the key but withholds the last byte."""
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 0.5)
    waiting = Waiting(place, 1)
    wait_until(lambda: is_listening(place))
    with connected(place) as slow, connected(place) as incomplete:
        incomplete.sendall(proof_for(incomplete)[:-1])
        with pytest.raises(ConnectionError):
            trickle(slow, proof_for(slow))
        with suppress(ConnectionResetError):
            assert incomplete.recv(1) == b""
    with started("-c", IDLE, str(place)):
        assert len(waiting.ranks()) == 1
        waiting.close()


def trickle(end, data):
    for byte in data:
        end.sendall(bytes([byte]))
        time.sleep(0.1)


def handshake(**changes):
    """Return what rank 0 makes of a proof. changes: arguments of `proof_for`."""
    with (
        tcp.listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()) as end,
    ):
        candidate = tcp.accept(listener)
        with candidate.end:
            end.sendall(proof_for(end, **changes).ljust(PROOF_BYTES, b"\1"))
            joining.wait([candidate.end], HANG_S)
            return candidate.read(KEY.encode())


def test_a_proof_holds_only_for_its_role_and_for_nonces_of_full_length():
    with handshake().connection:
        pass
    with pytest.raises(WrongKeyError):
        handshake(nonce=bytes(30))
    with pytest.raises(WrongKeyError):
        handshake(role=b"rank 0")


class GaveUpError(Exception):
    """The test's rank has heard why it has to wait."""


def give_up(reason):
    raise GaveUpError(reason)


def test_a_rank_hears_why_it_has_to_wait(place, monkeypatch):
    with pytest.raises(GaveUpError, match="Connection refused"):
        tcp.join(place, give_up)
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 0.1)
    with (
        tcp.listen(place.host, place.port),  # this listener never answers
        pytest.raises(GaveUpError, match="timed out"),
    ):
        tcp.join(place, give_up)


def test_each_reason_is_told_once(place, monkeypatch):
    reasons = []
    monkeypatch.setattr(tcp, "TRY_AGAIN_S", 0.01)
    errors = iter([OSError("refused"), OSError("gone"), OSError("refused")])
    monkeypatch.setattr(tcp, "_join_once", lambda place: raise_next(errors))
    with pytest.raises(StopIteration):
        tcp.join(place, reasons.append)
    assert reasons == ["refused", "gone"]


def raise_next(errors):
    raise next(errors)


def is_listening(place):
    try:
        socket.create_connection((place.host, place.port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_ranks_that_never_join_are_explained(place):
    expected = (
        f"2 ranks of other machines did not join at {place} within 0.1 s; run `longshore join` on "
        "each of them, with this model, the same properties and the same LONGSHORE_RANK_KEY"
    )
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        wait_for_ranks(place, 2, 0.1)


def test_rank_0_reminds_of_those_that_are_missing(place, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(joining, "REMIND_S", 0.01)
    with pytest.raises(ConfigurationError):
        wait_for_ranks(place, 1, 1.0)
    assert caplog.messages.count(f"0 of 1 ranks have joined at {place}") > 2


def test_a_name_that_stands_for_this_machine_alone_is_warned_of(place, caplog):
    """/etc/hosts often gives such an address to the machine's own name."""
    with pytest.raises(ConfigurationError):
        wait_for_ranks(replace(place, host="localhost"), 1, 0.1)
    assert re.fullmatch(
        r"localhost is the address (127\.0\.0\.1|::1) on this machine, which no other machine.*",
        *caplog.messages,
    )


def test_an_address_of_another_machine_is_an_error():
    elsewhere = MeetingPoint("203.0.113.1", 29400, KEY.encode())
    with pytest.raises(
        ConfigurationError, match=r"rank_address=203\.0\.113\.1:29400: .*this machine"
    ):
        wait_for_ranks(elsewhere, 1, 1.0)


@pytest.mark.parametrize("address", [None, "10.0.0.1", "10.0.0.1:0", ":80", "host:ssh"])
def test_an_address_is_needed(address):
    with pytest.raises(ConfigurationError, match=r"option\.nodes=2 needs option\.rank_address"):
        meeting_point(Options(nodes=2, rank_address=address), {KEY_VARIABLE: KEY})


@pytest.mark.parametrize("key", [None, "too short"])
def test_a_key_is_needed(key):
    variables = {} if key is None else {KEY_VARIABLE: key}
    with pytest.raises(ConfigurationError, match="the same secret of at least 16 characters"):
        meeting_point(Options(nodes=2, rank_address="10.0.0.1:80"), variables)


def test_an_address_may_be_of_ipv6():
    options = Options(nodes=2, rank_address="[::1]:80")
    assert meeting_point(options, {KEY_VARIABLE: KEY}) == MeetingPoint("::1", 80, KEY.encode())


def test_the_key_is_in_no_log(place):
    assert KEY not in repr(place)


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
        RankLaunch.decode(msgspec.msgpack.encode(message))


def test_a_failure_report_of_another_version_is_explained():
    error = FailureReport.decode_error(msgspec.msgpack.encode({"kind": "new"}), 3)
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith("rank 3 runs another version of Longshore")


def test_a_rank_with_another_model_is_refused(tiny_model, place):
    """Rank 0's model is in the folder `model`, which has no files."""
    arguments = ("--join", str(place), str(tiny_model("llama")), str(os.getpid()))
    with started("-m", "engine.follow", *arguments):
        group = Group(place)
        try:
            with pytest.raises(ConfigurationError, match="differs from rank 0's in model"):
                group.followers.wait()
        finally:
            group.followers.close()


def test_a_store_that_cannot_be_reached_is_an_error_of_configuration(monkeypatch):
    monkeypatch.setattr(group_module, "STORE_S", 0.5)
    port = free_port()  # nobody listens there
    with pytest.raises(ConfigurationError, match=rf"cannot reach rank 0 at 127\.0\.0\.1:{port} "):
        open_store(GroupAddress(port, "127.0.0.1", "", 60.0), 2)


def test_the_store_listens_at_the_address_of_rank_0_only():
    server = StoreServer("127.0.0.1", tcp.listen("127.0.0.1", 0))
    store = open_store(GroupAddress(server.port, "127.0.0.1", "", 60.0), 2)
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port))


@pytest.mark.parametrize(
    ("backend", "variable", "value"),
    [("gloo", "GLOO_SOCKET_IFNAME", "eth1"), ("nccl", "NCCL_SOCKET_IFNAME", "=eth1")],
)
def test_a_backend_uses_exactly_one_interface(backend, variable, value, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    with interface_for(backend, "eth1"):
        assert os.environ[variable] == value
    assert variable not in os.environ
    monkeypatch.setenv(variable, "eth2")  # the user's choice
    with interface_for(backend, "eth1"):
        assert os.environ[variable] == "eth2"


def test_only_gloo_needs_an_interface_on_one_machine():
    for device, interface in (("cpu", "lo"), ("cuda", "")):
        followers = Followers(Path("model"), Options(), 1, torch.device(device), print)
        followers.close()
        assert followers.address.interface == interface


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") == ""
