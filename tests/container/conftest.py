"""Fixtures of the container's tests, and leak checks that run after each of them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gevent
import msgspec
import pytest
import tokenizers
import zmq
from flask.testing import FlaskClient
from tokenizers import decoders, models, pre_tokenizers

from container.configuration.resolve import Configuration, load_configuration
from container.front_end.app import create_app, create_task_app
from container.isolation.helper import Helper
from container.wire.engine_client import EngineClient
from core.configuration.options import make_options
from core.configuration.task import Task
from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.configurations import Load
from tests.container.fake_engine import FACTS, FakeEngine, says
from tests.container.processes import HANG_S, Caller, children, free_port

EOS = 256

Serve = Callable[..., FlaskClient]


def eventually(predicate: Callable[[], object], timeout_s: float = HANG_S) -> None:
    """Run greenlets until the predicate holds."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, "did not happen in time"
        gevent.sleep(0.005)


@pytest.fixture(autouse=True)
def leak_detector() -> Iterator[None]:
    """Check that the test leaves no child process or open socket behind."""
    before = set(children(os.getpid()))
    yield
    assert set(children(os.getpid())) <= before, "a child process is still running"
    sockets = [held for held in gc.get_objects() if issubclass(type(held), zmq.Socket)]
    assert all(socket.closed for socket in sockets), "a ZeroMQ socket is still open"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tokenizer with one token per byte, so that `é` takes two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer(tokenizer_dir)


@pytest.fixture
def caller() -> Caller:
    """A client of a server that is not started yet."""
    return Caller(free_port())


@pytest.fixture
def endpoint(short_dir: Path) -> str:
    return f"ipc://{short_dir}/engine.sock"


@pytest.fixture
def engine(endpoint: str, tokenizer: Tokenizer) -> Iterator[FakeEngine]:
    engine = FakeEngine(endpoint, says([*tokenizer.encode("Hi there"), EOS]))
    yield engine
    engine.close()


@pytest.fixture
def client(endpoint: str, engine: FakeEngine) -> Iterator[EngineClient]:
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    eventually(lambda: client.health().healthy)
    yield client
    client.close()


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    """A chat template that adds little to a prompt, because every byte is a token."""
    return ChatTemplate(
        "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{% for each in messages %}{{ each.role[0] }}:{{ each.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )


@pytest.fixture(scope="session")
def helper(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Helper]:
    """A helper whose process has already started.

    It starts before `leak_detector`, which therefore does not report it as left behind.
    """
    helper = Helper(tokenizer.model_dir, template.source)
    helper.grammar(StructuredOutputsParams(regex="a"), (EOS,))
    yield helper
    helper.close()


@pytest.fixture
def serve(
    client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate, helper: Helper
) -> Serve:
    """Return a function that makes a test client of the application with the given options."""

    def serve(**options: Any) -> FlaskClient:
        app = create_app(client, tokenizer, make_options(options), "demo", template, helper=helper)
        return app.test_client()

    return serve


@pytest.fixture
def http(serve: Serve) -> FlaskClient:
    return serve()


@pytest.fixture
def task_app(endpoint: str, engine: FakeEngine) -> Iterator[Serve]:
    """Yield a function that makes a test client of the application for a task."""
    engine.facts = msgspec.structs.replace(FACTS, executor="task", max_model_len=0)
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    eventually(lambda: client.health().healthy)

    def make(kind: str, name: str = "text-classification", **options: Any) -> FlaskClient:
        task = Task(kind=kind, name=name)  # pyright: ignore[reportArgumentType]
        return create_task_app(client, make_options(options), "demo", task).test_client()

    yield make
    client.close()


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that resolves a configuration from a file's text and variables."""

    def load(text: str, variables: Mapping[str, str] | None = None) -> Configuration:
        path = tmp_path / "serving.properties"
        path.write_text(text, "utf-8")
        return load_configuration(path, variables or {})

    return load
