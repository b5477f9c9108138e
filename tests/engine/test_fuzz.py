"""Arbitrary and nearly valid bytes from the wire and from files cause only expected errors."""

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
from core.protocol.messages import Abort, Hello, LoadAdapter, Submit
from core.sampling import SamplingParams
from engine.lora.files import LayerSize, read_adapter
from engine.model.checkpoint import open_checkpoint
from engine.model.families import LLAMA
from engine.serve.connection import Connection

fuzz = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5),
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
            _, message = self._connection.inbox.get(timeout=60)
            if message == Abort("last"):
                return
            assert isinstance(message, Submit | Hello | Abort | LoadAdapter), message


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:  # `short_dir` lives for one test
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
    prompt=st.just([1]) | VALUES,
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


NUM_BYTES = 16
"""Bytes of a tensor [2, 2] in fp32."""
FIELDS = {
    "dtype": st.sampled_from(["F32", "BF16", "I32", "X"]) | VALUES,
    "shape": st.lists(st.integers(0, 4), max_size=3) | VALUES,
    "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | VALUES,
}


@st.composite
def safetensors(draw: st.DrawFn, *names: str) -> bytes:
    """Draw a file of tensors [2, 2]. In half of the files, one thing is wrong."""
    header: dict[str, object] = {
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [begin, begin + NUM_BYTES]}
        for begin, name in zip(range(0, 99, NUM_BYTES), names, strict=False)
    }
    num_bytes, length = NUM_BYTES * len(names), None
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    name = draw(st.sampled_from(names))
    wrong = st.sampled_from([*FIELDS, "tensor", "name", "length", "data", "all"])
    match draw(wrong) if draw(st.booleans()) else None:
        case "tensor":
            header[name] = draw(VALUES)
        case "name":
            header[draw(st.sampled_from(["model.layer.lora_C.weight", "x", ""]))] = header.pop(name)
        case "length":
            length = draw(st.sampled_from([2**63, 7, 0]))
        case "data":
            data = draw(st.binary(max_size=3 * NUM_BYTES))
        case "all":
            return draw(st.binary(max_size=40))
        case str(field) if field in FIELDS:
            header[name] = {**header[name], field: draw(FIELDS[field])}
        case _:
            pass
    encoded = msgspec.json.encode(header)
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


LORA = [f"base_model.model.layer.lora_{side}.weight" for side in "AB"]
CONFIG = {"peft_type": "LORA", "lora_alpha": 1.0, "r": 2, "bias": "none", "use_rslora": False}
WRONG_CONFIGS = st.binary(max_size=30) | st.builds(
    lambda name, value: msgspec.json.encode({**CONFIG, name: value}),
    st.sampled_from([*CONFIG]),
    VALUES,
)


@fuzz
@given(data=safetensors("model.embed_tokens.weight"))
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
    data=safetensors(*LORA),
    config=st.booleans().flatmap(
        lambda is_wrong: WRONG_CONFIGS if is_wrong else st.just(msgspec.json.encode(CONFIG))
    ),
)
@example(b"", b"[" * 100_000)
def test_adapters(tmp_path: Path, data: bytes, config: bytes) -> None:
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    sizes = {"layer": LayerSize(2, 2, torch.float32)}
    with suppress(RequestError):
        read_adapter(tmp_path, sizes, max_rank=4)
