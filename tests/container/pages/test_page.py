"""The live page: its files, its headers, who may open it, and its stream of events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gevent
import msgspec
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from container.front_end.app import create_app
from container.wire.engine_client import EngineClient
from container.wire.snapshots import RENEWAL_S, WATCH_S, SnapshotFeed
from core.configuration.options import ObserverOptions, Options, SpeculationOptions
from core.protocol.messages import Watch, Watched
from core.protocol.snapshot import GroupSnapshot, SequenceSnapshot, Snapshot
from core.protocol.stats import Stats, Total
from core.text.tokenizer import Tokenizer
from tests.clock import Clock
from tests.container.conftest import Serve, eventually
from tests.container.fake_engine import FACTS, FakeEngine, says

ELSEWHERE = {"REMOTE_ADDR": "203.0.113.9"}
PATHS = ("/", "/ui/main.js", "/ui/events")

SEQUENCE = SequenceSnapshot(
    id=3, request=3, phase="decode", num_prompt_tokens=5, num_tokens=9, num_computed_tokens=8,
    max_length=25, arrived=1.0, admitted=1.5, first_token=2.0, tables=[[(7, 1)]], freed=[0],
)  # fmt: skip
SNAPSHOT = Snapshot(
    now=3.0, sequences=[SEQUENCE], ended=[], num_running=1, num_waiting=0,
    groups=[GroupSnapshot(block_size=16, window=None, num_layers=0)], num_blocks=40,
    num_held_blocks=1, kept_blocks=[(8, 2)],
)  # fmt: skip


class Events:
    """The events of an open stream."""

    def __init__(self, response: TestResponse) -> None:
        assert (response.status_code, response.mimetype) == (200, "text/event-stream")
        self.response = response
        self._blocks: Iterator[bytes] = response.iter_encoded()

    def next(self, name: str) -> Any:
        """Return the data of the next event with this name."""
        for block in self._blocks:
            if block.startswith(f"event: {name}\ndata: ".encode()):
                return msgspec.json.decode(block.split(b"data: ", 1)[1])
        raise AssertionError(f"the stream ended before '{name}'")


@pytest.fixture
def events(http: FlaskClient) -> Iterator[Events]:
    response = http.get("/ui/events", buffered=False)
    yield Events(response)
    response.close()


def test_the_page_and_its_files_have_a_strict_policy(http: FlaskClient) -> None:
    page = http.get("/")
    assert (page.status_code, page.mimetype) == (200, "text/html")
    for path in ("/", "/ui/page.css", "/ui/main.js"):
        response = http.get(path)
        assert response.status_code == 200
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "http" not in policy


def test_the_page_loads_nothing_from_outside_and_has_no_inline_code(http: FlaskClient) -> None:
    page = http.get("/").text
    assert "://" not in page
    assert "<style" not in page
    assert " style=" not in page
    assert not re.search(r"\son\w+\s*=", page)
    assert page.count("<script") == 1
    assert http.get("/ui/../routes.py").status_code == 404
    assert http.get("/ui/routes.py").status_code == 404


@pytest.mark.parametrize("path", PATHS)
def test_the_page_is_for_clients_on_this_machine_unless_the_option_says_so(
    serve: Serve, path: str
) -> None:
    def status(http: FlaskClient, **request: Any) -> int:
        response = http.get(path, buffered=False, **request)
        response.close()
        return response.status_code

    auto, on, off = serve(), serve(ui="true"), serve(ui="false")
    assert status(auto) == status(on) == status(on, environ_base=ELSEWHERE) == 200
    assert status(auto, environ_base={"REMOTE_ADDR": "::1"}) == 200
    missing = (404, 405)  # 405 at /, where clients of text-generation-inference may POST
    assert status(auto, environ_base=ELSEWHERE) == 404
    assert status(off) in missing
    assert status(auto, environ_base={"REMOTE_ADDR": ""}) == 404, "no address"
    for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"):
        assert status(auto, headers={name: "203.0.113.9"}) == 404, "sent by a proxy"
    for host in ("localhost", "localhost:8080", "LOCALHOST", "127.0.0.1:8080", "[::1]:8080"):
        assert status(auto, headers={"Host": host}) == 200
    for host in ("evil.example", "evil.example:8080", "203.0.113.9", "localhost.evil", "[", ""):
        assert status(auto, headers={"Host": host}) == 404, "proxy or DNS rebinding"
    assert status(on, headers={"Host": "evil.example"}) == 200


def test_events_name_the_strategy_and_pass_snapshots_on(engine: FakeEngine, events: Events) -> None:
    engine.stats = Stats(num_generated_tokens=12)
    about = events.next("engine")
    assert (about["batching"], about["model_name"], about["chat"]) == ("paged", "demo", True)
    assert about["model"] == "fake"
    assert (about["block_size"], about["is_paged"], about["is_recorded"]) == (16, True, False)
    engine.send(Watched(SNAPSHOT))
    data = events.next("snapshot")
    assert msgspec.convert(data["snapshot"], Snapshot) == SNAPSHOT
    assert data["counters"].keys() >= {"generated_tokens", "preemptions"}
    assert (about["proposer"], data["counters"]["drafts"]) == (None, {})


def test_events_have_the_totals_of_speculation_and_no_others(
    client: EngineClient, tokenizer: Tokenizer, engine: FakeEngine
) -> None:
    engine.stats = Stats(
        totals=(
            Total("vllm:spec_decode_num_drafts", "", {"": 3}),
            Total("longshore:spec_decode_steps", "", {"drafted": 2, "cost": 1}, "decision"),
            Total("longshore:api_key_requests", "", {"alice": 9}, "api_key"),
        )
    )
    speculation = SpeculationOptions(speculative_method="suffix", num_speculative_tokens=3)
    app = create_app(client, tokenizer, Options(speculation=speculation), "demo", None)
    response = app.test_client().get("/ui/events", buffered=False)
    events = Events(response)
    about = events.next("engine")
    assert (about["proposer"], about["num_drafts"]) == ("suffix", 3)
    eventually(lambda: client.copies[0].state.stats.totals)
    engine.send(Watched(SNAPSHOT))
    counters = events.next("snapshot")["counters"]
    assert counters["drafts"] == {"num_drafts": {"": 3}, "steps": {"drafted": 2, "cost": 1}}
    response.close()


def test_events_tell_that_a_model_has_no_chat_template(
    client: EngineClient, tokenizer: Tokenizer
) -> None:
    options = Options(observers=ObserverOptions(record="recording"))
    app = create_app(client, tokenizer, options, "demo", None)
    response = app.test_client().get("/ui/events", buffered=False)
    about = Events(response).next("engine")
    assert (about["chat"], about["is_recorded"]) == (False, True)
    response.close()


def test_the_engine_is_asked_for_snapshots_only_while_a_page_is_open(
    http: FlaskClient, engine: FakeEngine
) -> None:
    http.get("/")
    assert engine.of_type(Watch) == []
    response = http.get("/ui/events", buffered=False)
    stream = Events(response)
    stream.next("engine")
    engine.send(Watched(SNAPSHOT))
    stream.next("snapshot")
    eventually(lambda: engine.of_type(Watch) == [Watch(WATCH_S)])
    response.close()


def test_events_survive_a_restart_of_the_engine(
    engine: FakeEngine, events: Events, endpoint: str
) -> None:
    events.next("engine")
    engine.die("out of memory")
    assert "out of memory" in events.next("down")["reason"]
    restarted = FakeEngine(
        endpoint, says([65]), facts=msgspec.structs.replace(FACTS, batching="none")
    )
    try:
        assert events.next("engine")["batching"] == "none"
        restarted.send(Watched(SNAPSHOT))
        events.next("snapshot")
    finally:
        restarted.close()


def test_the_streams_end_when_the_worker_stops(client: EngineClient, events: Events) -> None:
    events.next("engine")
    client.end_watching()
    with pytest.raises(AssertionError, match="ended"):
        events.next("snapshot")


def test_a_feed_asks_again_and_again_while_somebody_waits() -> None:
    clock, asked = Clock(), list[float]()
    feed = SnapshotFeed(asked.append, clock)
    for _ in range(5):  # five pages
        assert feed.wait(0.001) is None
    assert asked == [WATCH_S]
    clock.now += RENEWAL_S
    feed.wait(0.001)
    assert asked == [WATCH_S] * 2
    clock.now += 100 * RENEWAL_S
    feed.push(SNAPSHOT)
    assert asked == [WATCH_S] * 2, "nobody waits, so the feed does not ask again"
    assert feed.wait(0.001) is None, "the feed keeps no old snapshot"
    feed.close()
    clock.now += RENEWAL_S
    assert feed.wait(60.0) is None
    assert len(asked) == 3


def test_every_page_gets_the_same_snapshot(client: EngineClient, engine: FakeEngine) -> None:
    waiting = [gevent.spawn(client.copies[0].snapshots.wait, 60.0) for _ in range(5)]
    eventually(lambda: engine.of_type(Watch))
    engine.send(Watched(SNAPSHOT))
    gevent.joinall(waiting)
    assert [greenlet.value for greenlet in waiting] == [SNAPSHOT] * 5
