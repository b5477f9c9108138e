"""A server over a fake executor in a thread, and its client."""

from __future__ import annotations

import threading

import pytest

from core.protocol.messages import Dead, Submit
from core.sampling import SamplingParams
from engine.engine import Engine
from engine.serve.connection import Connection
from engine.serve.server import Server
from engine.serve.text_service import TextService
from strategies.beam_group import BeamSearches
from tests.engine.serve.serving import FACTS, Client, Gate, Stop
from tests.strategies.fakes import strategy_of


@pytest.fixture
def engine():
    return Engine(strategy_of("paged"), Gate(), FACTS, features=(BeamSearches(),))


@pytest.fixture
def gate(engine):
    return engine.executor


@pytest.fixture
def connection(tmp_path):
    with Connection(f"ipc://{tmp_path}/e") as connection:
        yield connection


@pytest.fixture
def queue_limits():
    return {"max_waiting": 2}


@pytest.fixture
def endpoint(engine, gate, connection, queue_limits):
    endpoint = connection.endpoint
    thread = threading.Thread(target=_serve, args=(engine, connection, queue_limits))
    thread.start()
    yield endpoint
    gate.open.set()
    gate.error = Stop()
    client = Client(endpoint)
    while thread.is_alive():
        client.send(Submit("stop", [1], SamplingParams()))
        thread.join(0.1)
    client.close()


def _serve(engine, connection, queue_limits):
    try:
        Server(TextService(engine, connection), connection, **queue_limits).serve_forever()
    except Stop:
        pass
    except Exception as error:
        connection.broadcast(Dead(str(error)))


@pytest.fixture
def client(endpoint):
    client = Client(endpoint)
    yield client
    client.close()
