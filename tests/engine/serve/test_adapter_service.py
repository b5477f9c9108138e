"""Adapters over the engine's socket: loaded while steps continue, announced to every client."""

from __future__ import annotations

import threading

import pytest
import torch

from core.protocol.messages import (
    Failed,
    Hello,
    LoadAdapter,
    Performed,
    Ready,
    Submit,
    UnloadAdapter,
    Variants,
)
from core.sampling import Finish, SamplingParams
from engine.engine import Engine
from engine.lora import adapter_registry
from engine.lora.adapter_registry import AdapterRegistry
from engine.lora.files import AdapterWeights, LayerWeights
from tests.engine.serve.serving import (
    FACTS,
    Client,
    Gate,
    until,
)
from tests.escaping import PanicException
from tests.strategies.fakes import strategy_of

GREEDY = SamplingParams(temperature=0, max_tokens=3)


class Slots:
    """Adapter slots that record what is written to them."""

    num_slots, max_rank, sizes, head = 2, 8, {}, {}

    def __init__(self):
        self.written = []

    def write(self, slot, weights):
        self.written.append((slot, weights.rank))


class Files:
    """A fake reader of rank-4 adapters: it blocks while closed, and always fails for /broken."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()

    def read(self, folder, sizes, max_rank, head):
        self.open.wait(60)
        if folder.name == "broken":
            raise OSError("no such adapter")
        if folder.name == "panics":
            raise PanicException("of safetensors")
        return AdapterWeights({"layer": LayerWeights(torch.zeros(4, 1), torch.zeros(1, 4))})


@pytest.fixture
def files(monkeypatch):
    files = Files()
    monkeypatch.setattr(adapter_registry, "read_adapter", files.read)
    return files


@pytest.fixture
def slots():
    return Slots()


@pytest.fixture
def engine(slots):
    return Engine(strategy_of("paged"), Gate(), FACTS, features=(AdapterRegistry(slots),))


def load(client, name, src="/src"):
    client.send(LoadAdapter(f"load-{name}", name, src))


def loaded(client, name):
    """Load an adapter and return the names of all loaded ones."""
    load(client, name)
    names = [adapter.name for adapter in client.receive(Variants).loaded]
    assert client.receive(Performed).id == f"load-{name}"
    return names


@pytest.mark.usefixtures("files")
def test_every_client_learns_of_loaded_adapters(client, endpoint, slots):
    other = Client(endpoint)
    other.send(Hello())
    assert other.receive(Ready).variants == ()
    assert loaded(client, "a") == ["a"]
    assert [loaded.name for loaded in other.receive(Variants).loaded] == ["a"]
    client.send(Hello())
    [adapter] = client.receive(Ready).variants
    assert (adapter.name, adapter.src) == ("a", "/src")
    assert slots.written == [(0, 4)]
    client.send(UnloadAdapter("u", "a"))
    assert client.receive(Variants).loaded == ()
    assert client.receive(Performed).id == "u"
    assert other.receive(Variants).loaded == ()
    other.close()


@pytest.mark.usefixtures("files")
def test_rejected_loads_and_unloads(client):
    def refused(message):
        client.send(message)
        failed = client.receive(Failed)
        assert failed.id == message.id
        return failed.kind

    assert refused(Submit("s", [1], GREEDY, "a")) == "not_found"
    assert refused(UnloadAdapter("u", "a")) == "not_found"
    loaded(client, "a")
    assert refused(LoadAdapter("l", "a", "/src")) == "conflict"
    assert refused(LoadAdapter("l", "b", "/broken")) == "failed"
    assert refused(LoadAdapter("l", "b", "/panics")) == "failed"
    loaded(client, "b")
    assert refused(LoadAdapter("l", "c", "/src")) == "no_room"
    client.send(Submit("s", [1], GREEDY, "b"))
    assert client.answer("s")[1] == Finish.LENGTH


def test_steps_continue_while_files_are_read(client, files):
    files.open.clear()
    load(client, "a")
    client.send(LoadAdapter("again", "a", "/src"))
    assert client.receive(Failed).kind == "conflict", "the name is reserved meanwhile"
    client.send(Submit("s", [1], GREEDY))
    assert client.answer("s")[1] == Finish.LENGTH
    client.send(Submit("s", [1], GREEDY, "a"))
    assert client.receive(Failed).kind == "not_found", "the adapter is not loaded yet"
    files.open.set()
    assert client.receive(Performed).id == "load-a"
    client.send(Submit("s", [1], GREEDY, "a"))
    assert client.answer("s")[1] == Finish.LENGTH


@pytest.mark.usefixtures("files")
def test_a_slot_is_free_when_its_last_request_has_ended(
    client,
    connection,
    engine,
    gate,
    slots,
):
    loaded(client, "a")
    loaded(client, "b")
    gate.open.clear()
    client.send(Submit("s", [1], GREEDY, "a"))
    until(lambda: engine.strategy.running)
    client.send(UnloadAdapter("u", "a"))
    load(client, "c")
    until(lambda: connection.inbox.qsize() == 2)
    gate.open.set()
    assert client.receive(Failed).kind == "no_room"
    assert client.answer("s")[1] == Finish.LENGTH
    assert loaded(client, "c") == ["b", "c"]
    assert [slot for slot, _ in slots.written] == [0, 1, 0]


class TestWithoutAdapters:
    @pytest.fixture
    def engine(self):
        return Engine(strategy_of("paged"), Gate(), FACTS)

    def test_all_adapter_messages_are_rejected(self, client):
        for message in (
            LoadAdapter("x", "a", "/src"),
            UnloadAdapter("x", "a"),
            Submit("x", [1], GREEDY, "a"),
        ):
            client.send(message)
            failed = client.receive(Failed)
            assert (failed.id, failed.kind, failed.field) == ("x", "rejected", "adapters")
            assert "option.enable_lora=true" in failed.message
