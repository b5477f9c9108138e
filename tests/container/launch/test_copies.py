"""Several copies of the model: which one gets a request, and what workers report about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from container.front_end.app import create_app
from container.wire.copies_client import CopiesClient
from container.wire.engine_client import EngineClient
from container.wire.token_stream import TokenStream
from core.configuration.options import make_options
from core.errors import EngineUnavailableError, GenerationError, NotFoundError
from core.protocol.messages import LoadAdapter, Refused, Submit, UnloadAdapter
from core.protocol.stats import Stats
from core.routing import CHUNK_TOKENS
from core.sampling import SamplingParams
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS, eventually
from tests.container.fake_engine import FakeEngine, says, stalls

PARAMS = SamplingParams(max_tokens=4)
LONG = [7] * CHUNK_TOKENS
OTHER = [8] * CHUNK_TOKENS


@pytest.fixture
def engines(short_dir: Path, tokenizer: Tokenizer) -> Iterator[list[FakeEngine]]:
    script = says([*tokenizer.encode("Hi there"), EOS])
    engines = [FakeEngine(f"ipc://{short_dir}/engine.sock.{copy}", script) for copy in range(2)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def client(engines: list[FakeEngine]) -> Iterator[EngineClient]:
    client = CopiesClient(*(engine.endpoint for engine in engines), heartbeat_timeout_s=60)
    eventually(lambda: client.num_serving() == 2)
    yield client
    client.close()


@pytest.fixture
def http(client: EngineClient, tokenizer: Tokenizer, tmp_path: Path) -> FlaskClient:
    options = make_options(
        {
            "copies": 2,
            "enable_lora": True,
            "source_roots": "/tmp",
            "enable_stateful_sessions": True,
            "sessions_path": str(tmp_path / "sessions"),
        }
    )
    return create_app(client, tokenizer, options, "demo").test_client()


def submit(
    client: EngineClient, prompt: list[int], *, session: str | None = None, variant: str = ""
) -> TokenStream:
    """Submit a prompt to the copy that the client chooses for it."""
    return client.submit(Submit("", prompt, PARAMS, variant), session)


def submits(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.of_type(Submit)) for engine in engines]


def series(http: FlaskClient, name: str) -> dict[str | None, float]:
    """Return the values of a metric by the label `engine`."""
    families = text_string_to_metric_families(http.get("/metrics").get_data(as_text=True))
    return {
        sample.labels.get("engine"): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_running_requests_spread_over_the_copies(
    client: EngineClient, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.script = stalls()
    for _ in range(6):
        submit(client, [1, 2])
    eventually(lambda: submits(engines) == [3, 3])


def test_the_load_of_a_copy_includes_requests_of_other_workers(
    client: EngineClient, engines: list[FakeEngine]
) -> None:
    engines[0].stats = Stats(num_running=2, num_waiting=1)
    eventually(lambda: client.copies[0].load == 3)
    for _ in range(3):
        submit(client, [1, 2])
    eventually(lambda: submits(engines) == [0, 3])


def test_prompts_that_begin_alike_go_to_one_copy(
    client: EngineClient, engines: list[FakeEngine]
) -> None:
    engines[0].script = stalls()
    submit(client, LONG)  # the first copy
    submit(client, OTHER)  # the second one, as the first is busy
    for number in range(4):
        stream = submit(client, [*OTHER, number])
        eventually(lambda: stream.has_ended)  # noqa: B023
    eventually(lambda: submits(engines) == [1, 5])


def test_workers_agree_about_a_session(client: EngineClient, engines: list[FakeEngine]) -> None:
    endpoints = [engine.endpoint for engine in engines]
    other = CopiesClient(*endpoints, heartbeat_timeout_s=60)
    try:
        eventually(lambda: other.num_serving() == 2)
        homes: set[int] = set()
        for number in range(30):  # fewer than one run in 10**8 uses only one engine
            before = submits(engines)
            for worker in (client, other, client):
                submit(worker, [1], session=f"session {number}")
            eventually(lambda: sum(submits(engines)) == sum(before) + 3)  # noqa: B023
            grown = [now - then for now, then in zip(submits(engines), before, strict=True)]
            assert sorted(grown) == [0, 3]
            homes.add(grown.index(3))
        assert homes == {0, 1}
    finally:
        other.close()


def test_a_session_of_sagemaker_stays_at_a_copy(
    http: FlaskClient, engines: list[FakeEngine]
) -> None:
    def ask(session: str) -> Any:
        headers = {"X-Amzn-SageMaker-Session-Id": session}
        return http.post("/invocations", json={"inputs": "Q"}, headers=headers)

    opened = ask("NEW_SESSION")
    session = opened.headers["X-Amzn-SageMaker-New-Session-Id"].partition(";")[0]
    for _ in range(3):
        assert ask(session).status_code == 200
    assert sorted(submits(engines)) == [0, 4]


def test_the_death_of_a_copy_fails_its_requests_only(
    client: EngineClient, engines: list[FakeEngine], http: FlaskClient
) -> None:
    for engine in engines:
        engine.script = stalls()
    first, second = submit(client, [1]), submit(client, [2])
    eventually(lambda: submits(engines) == [1, 1])
    engines[0].die()
    with pytest.raises(GenerationError, match="out of memory"):
        first.get(60)
    assert second.get(0.1) == []
    assert http.get("/ping").status_code == 200
    assert series(http, "longshore:copies_serving") == {None: 1}
    assert set(series(http, "vllm:num_requests_running")) == {"1"}
    for _ in range(3):
        submit(client, [3])
    eventually(lambda: submits(engines) == [1, 4])


def test_a_restarted_copy_gets_requests_once_it_is_ready(
    client: EngineClient, engines: list[FakeEngine]
) -> None:
    engines[1].script = stalls()
    engines[0].die()
    eventually(lambda: client.num_serving() == 1)
    engines[0] = FakeEngine(engines[0].endpoint, stalls(), ready=False)
    submit(client, [1])
    assert client.copies[0].load == 0
    engines[0].ready = True
    eventually(lambda: client.num_serving() == 2)
    submit(client, [1])
    eventually(lambda: submits(engines) == [1, 1])


def test_a_copy_that_hangs_gets_no_requests(
    client: EngineClient, engines: list[FakeEngine], http: FlaskClient
) -> None:
    engines[0].stalled_s = 3.0
    eventually(lambda: client.num_serving() == 1)
    for _ in range(3):
        submit(client, [1])
    eventually(lambda: submits(engines) == [0, 3])
    assert http.get("/ping").status_code == 200
    engines[1].stalled_s = 3.0
    eventually(lambda: client.num_serving() == 0)
    assert "hangs" in http.get("/ping").get_json()["error"]


def test_requests_and_health_checks_fail_if_no_copy_serves(
    client: EngineClient, engines: list[FakeEngine], http: FlaskClient
) -> None:
    for engine in engines:
        engine.die()
    eventually(lambda: client.num_serving() == 0)
    with pytest.raises(EngineUnavailableError):
        submit(client, [1])
    for path in ("/ping", "/metrics"):
        assert http.get(path).status_code == 503


def test_metrics_have_series_of_each_copy(
    client: EngineClient, engines: list[FakeEngine], http: FlaskClient
) -> None:
    for number, engine in enumerate(engines):
        engine.stats = Stats(num_running=number + 1, num_waiting=1, finished={"stop": 5 + number})
    eventually(lambda: [copy.state.stats.num_running for copy in client.copies] == [1, 2])
    assert series(http, "vllm:num_requests_running") == {"0": 1, "1": 2}
    assert series(http, "vllm:request_success_total") == {"0": 5, "1": 6}
    assert series(http, "longshore:copies_serving") == {None: 2}
    assert http.get("/load").get_json() == {"server_load": 5}
    text = http.get("/metrics").get_data(as_text=True)
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1


def test_refused_requests_are_counted_once(
    client: EngineClient, http: FlaskClient, engines: list[FakeEngine]
) -> None:
    assert http.post("/invocations", json={"inputs": 5}).status_code == 400

    def counted() -> list[Refused]:
        return [message for engine in engines for message in engine.of_type(Refused)]

    eventually(counted)
    for engine in engines:
        engine.script = stalls()
    for _ in engines:
        submit(client, [1])
    eventually(lambda: submits(engines) == [1, 1])  # so all earlier messages have arrived
    assert counted() == [Refused({"invalid": 1})]


def test_an_adapter_is_loaded_by_all_copies(
    client: EngineClient, engines: list[FakeEngine], http: FlaskClient
) -> None:
    loaded = http.post("/adapters", json={"name": "a", "src": "/tmp/a"})
    assert loaded.status_code == 200
    assert [len(engine.adapters) for engine in engines] == [1, 1]
    assert [row["name"] for row in http.get("/adapters").get_json()["adapters"]] == ["a"]
    assert http.post("/adapters", json={"name": "a", "src": "/tmp/a"}).status_code == 409
    assert http.delete("/adapters/a").status_code == 200
    assert [len(engine.adapters) for engine in engines] == [0, 0]
    assert http.delete("/adapters/a").status_code == 404
    assert [len(engine.of_type(UnloadAdapter)) for engine in engines] == [2, 1]


def test_only_copies_with_the_adapter_get_its_requests(
    client: EngineClient, engines: list[FakeEngine], http: FlaskClient
) -> None:
    """One copy lacks the adapter, as after a restart, which loses adapters loaded over HTTP."""
    reply = client.copies[1].request(lambda id: LoadAdapter(id, "a", "/tmp/a"))
    assert reply.get(60) is not None
    eventually(lambda: client.variants)
    for _ in range(3):
        submit(client, [1], variant="a")
    eventually(lambda: submits(engines) == [0, 3])
    assert http.post("/adapters", json={"name": "a", "src": "/tmp/a"}).status_code == 200
    assert [len(engine.of_type(LoadAdapter)) for engine in engines] == [1, 1]
    with pytest.raises(NotFoundError):
        submit(client, [1], variant="b").get(60)


def test_the_page_shows_the_copy_that_its_address_names(http: FlaskClient) -> None:
    for query, copy in (("", 0), ("?copy=1", 1)):
        response = http.get(f"/ui/events{query}", buffered=False)
        first = next(iter(response.response))
        response.close()
        assert f'"copy":{copy},"copies":2'.encode() in first
    assert http.get("/ui/events?copy=2").status_code == 404
