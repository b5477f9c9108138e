"""Arbitrary and nearly valid bytes from the wire and from files end with their own errors only."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.errors import ConfigurationError, RequestError
from core.messages import Abort, Hello, LoadAdapter, Submit
from core.sampling import SamplingParams
from engine.lora.files import LayerSize, read_adapter
from engine.model.checkpoint import open_checkpoint
from engine.model.families import LLAMA
from engine.serve.connection import Connection

fuzz = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


class Peer:
    """An engine's connection and a client's bare socket."""

    def __init__(self, connection: Connection, socket: zmq.Socket[bytes]) -> None:
        self._connection = connection
        self._socket = socket

    def survives(self, *frames: bytes) -> None:
        """Send frames, and check that the engine still receives the next message."""
        self._socket.send_multipart(frames)
        self._socket.send(msgspec.msgpack.encode(Abort("last")))
        while True:
            _, message = self._connection.inbox.get(timeout=10)
            if message == Abort("last"):
                return
            assert isinstance(message, Submit | Hello | Abort | LoadAdapter), message


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        endpoint = f"ipc://{folder}/engine.sock"
        context = zmq.Context()
        with Connection(endpoint) as connection, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(endpoint)
            yield Peer(connection, socket)
        context.term()


@fuzz
@given(frames=st.lists(st.binary(max_size=60), min_size=1, max_size=3))
@example([b"\x91" * 100_000])
@example([b""])
def test_arbitrary_frames(peer: Peer, frames: list[bytes]) -> None:
    peer.survives(*frames)


@fuzz
@given(
    params=st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), VALUES, max_size=3),
    prompt=VALUES,
)
@example({"temperature": -1.0}, [1])
@example({"structured_outputs": {}}, [1])
def test_messages_with_wrong_fields(peer: Peer, params: object, prompt: object) -> None:
    peer.survives(msgspec.msgpack.encode(["Submit", "1", prompt, params]))


@fuzz
@given(at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_damaged_messages(peer: Peer, at: int, byte: int, cut: int) -> None:
    message = bytearray(msgspec.msgpack.encode(Submit("1", [1, 2], SamplingParams(stop=("a",)))))
    message[at % len(message)] = byte
    peer.survives(bytes(message[: len(message) - cut]))


TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "X"]) | VALUES,
        "shape": st.lists(st.integers(0, 4), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | VALUES,
    },
)
NAMES = st.sampled_from(
    [
        "base_model.model.layer.lora_A.weight",
        "base_model.model.layer.lora_B.weight",
        "model.embed_tokens.weight",
        "__metadata__",
    ]
)
HEADERS = st.dictionaries(NAMES, TENSOR | VALUES, max_size=3).map(msgspec.json.encode)
FILES = st.binary(max_size=40) | st.builds(
    lambda header, length, data: struct.pack("<Q", length or len(header)) + header + data,
    HEADERS,
    st.sampled_from([0, 0, 0, 2**63, 7]),
    st.binary(max_size=48),
)


@fuzz
@given(data=FILES)
def test_safetensors_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with suppress(ConfigurationError):
        checkpoint = open_checkpoint(tmp_path, LLAMA)
        checkpoint.take("model.embed_tokens.weight", 2, 2)


@fuzz
@given(
    index=st.binary(max_size=30)
    | VALUES.map(lambda value: msgspec.json.encode({"weight_map": value}))
)
def test_indices_of_safetensors_files(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with suppress(ConfigurationError):
        open_checkpoint(tmp_path, LLAMA)


@fuzz
@given(
    data=FILES,
    config=st.binary(max_size=30)
    | st.dictionaries(
        st.sampled_from(["peft_type", "r", "lora_alpha", "bias", "use_rslora"]), VALUES
    ).map(lambda entries: msgspec.json.encode({"peft_type": "LORA", "lora_alpha": 1.0, **entries})),
)
@example(b"", b"[" * 100_000)
def test_adapters(tmp_path: Path, data: bytes, config: bytes) -> None:
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    sizes = {"layer": LayerSize(2, 2, torch.float32)}
    with suppress(RequestError):
        read_adapter(tmp_path, sizes, max_rank=4)
