"""AWS's container standards, as AWS's package for containers defines them.

Routes, headers, bodies and messages come from the package, as the package's own tests use them.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_hosting_container_standards.sagemaker.lora.constants import (
    LoRAHandlerType,
    ResponseMessage,
    SageMakerLoRAApiHeader,
)
from model_hosting_container_standards.sagemaker.lora.models import (
    SageMakerRegisterLoRAAdapterRequest,
)
from model_hosting_container_standards.sagemaker.lora.routes import get_lora_route_config
from model_hosting_container_standards.sagemaker.sessions.models import (
    SageMakerSessionHeader,
    SessionRequest,
    SessionRequestType,
)

PROMPT = {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0}
OPEN = SessionRequest(requestType=SessionRequestType.NEW_SESSION).model_dump(mode="json")
CLOSE = SessionRequest(requestType=SessionRequestType.CLOSE).model_dump(mode="json")
REGISTER = get_lora_route_config(LoRAHandlerType.REGISTER_ADAPTER)
UNREGISTER = get_lora_route_config(LoRAHandlerType.UNREGISTER_ADAPTER)


@pytest.fixture(scope="module")
def http(serve: Callable[[str], str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve("standards.properties"), timeout=60) as client:
        yield client


def invoke(http: httpx.Client, body: Any = None, **headers: str) -> httpx.Response:
    return http.post("/invocations", json=PROMPT if body is None else body, headers=headers)


def in_session(http: httpx.Client, session: str, body: Any = None) -> httpx.Response:
    return invoke(http, body, **{SageMakerSessionHeader.SESSION_ID: session})


def new_session(http: httpx.Client) -> str:
    opened = invoke(http, OPEN)
    assert opened.status_code == 200
    session, expires = opened.headers[SageMakerSessionHeader.NEW_SESSION_ID].split("; Expires=")
    assert len(session) == 36
    assert datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) > datetime.now(UTC)
    return session


def test_session(http: httpx.Client) -> None:
    session = new_session(http)
    for _ in range(3):
        assert in_session(http, session).status_code == 200
    closed = in_session(http, session, CLOSE)
    assert closed.status_code == 200
    assert closed.headers[SageMakerSessionHeader.CLOSED_SESSION_ID] == session
    assert in_session(http, session).status_code == 400


def test_sessions_are_independent(http: httpx.Client) -> None:
    first, second = new_session(http), new_session(http)
    assert first != second
    assert in_session(http, first, CLOSE).status_code == 200
    assert in_session(http, second).status_code == 200
    assert in_session(http, second, CLOSE).status_code == 200


def test_no_session(http: httpx.Client) -> None:
    answer = invoke(http)
    assert answer.status_code == 200
    assert SageMakerSessionHeader.NEW_SESSION_ID not in answer.headers


@pytest.mark.parametrize(
    ("body", "session"),
    [
        (None, "invalid-session-id"),
        (CLOSE, "nonexistent-id"),
        (CLOSE, None),
        ({"requestType": "INVALID_TYPE"}, None),
        ({**OPEN, "extra_field": "not_allowed"}, None),
    ],
)
def test_session_errors(http: httpx.Client, body: Any, session: str | None) -> None:
    headers = {SageMakerSessionHeader.SESSION_ID: session} if session else {}
    assert invoke(http, body, **headers).status_code == 400


@pytest.fixture
def source(model_dir: Path) -> str:
    """An adapter of rank 1 that changes the values of the first layer."""
    folder = model_dir / "lora"
    folder.mkdir(exist_ok=True)
    config = json.loads((model_dir / "config.json").read_text())
    layer = "base_model.model.model.layers.0.self_attn.v_proj"
    outputs = config["num_key_value_heads"] * config["head_dim"]
    shapes = {f"{layer}.lora_A.weight": [1, config["hidden_size"]],
              f"{layer}.lora_B.weight": [outputs, 1]}  # fmt: skip
    write_safetensors(folder / "adapter_model.safetensors", shapes)
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 8, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write random fp32 tensors of these shapes."""
    generator, header, data = random.Random(1), {}, b""
    for name, (rows, columns) in shapes.items():
        values = [generator.gauss(0, 1) for _ in range(rows * columns)]
        packed = struct.pack(f"<{len(values)}f", *values)
        offsets = [len(data), len(data) + len(packed)]
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": offsets}
        data += packed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def register(http: httpx.Client, name: str, source: str, **headers: str) -> httpx.Response:
    request = SageMakerRegisterLoRAAdapterRequest(name=name, src=source)
    body = request.model_dump(exclude_none=True)
    return http.request(REGISTER.method, REGISTER.path, json=body, headers=headers)


def unregister(http: httpx.Client, name: str, **headers: str) -> httpx.Response:
    path = UNREGISTER.path.format(adapter_name=name)
    return http.request(UNREGISTER.method, path, headers=headers)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_adapter(http: httpx.Client, source: str) -> None:
    registered = register(http, "romeo", source)
    assert registered.status_code == 200, registered.text
    assert ResponseMessage.ADAPTER_REGISTERED.format(alias="romeo") in registered.text
    plain = text_of(invoke(http))
    chosen = text_of(invoke(http, **{SageMakerLoRAApiHeader.ADAPTER_IDENTIFIER: "romeo"}))
    assert chosen != plain
    assert chosen == text_of(invoke(http, {**PROMPT, "model": "romeo"}))
    unregistered = unregister(http, "romeo")
    assert unregistered.status_code == 200
    assert ResponseMessage.ADAPTER_UNREGISTERED.format(alias="romeo") in unregistered.text
    gone = invoke(http, **{SageMakerLoRAApiHeader.ADAPTER_IDENTIFIER: "romeo"})
    assert gone.status_code == 404


def test_adapter_alias(http: httpx.Client, source: str) -> None:
    alias = {SageMakerLoRAApiHeader.ADAPTER_ALIAS: "Poems"}
    answer = register(http, "component-1", source, **alias)
    assert ResponseMessage.ADAPTER_REGISTERED.format(alias="Poems") in answer.text
    answer = unregister(http, "component-1", **alias)
    assert ResponseMessage.ADAPTER_UNREGISTERED.format(alias="Poems") in answer.text


def test_adapter_in_the_query(http: httpx.Client, source: str) -> None:
    answer = http.post(REGISTER.path, params={"name": "query", "src": source})
    assert answer.status_code == 200, answer.text
    assert unregister(http, "query").status_code == 200


def test_adapter_errors(http: httpx.Client) -> None:
    for body in ({"name": "a"}, {}):
        assert http.post(REGISTER.path, json=body).status_code == 400
    assert http.delete(f"{REGISTER.path}/").status_code == 405
    assert unregister(http, "never-loaded").status_code == 404
