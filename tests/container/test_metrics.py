"""`/metrics`: the engine's figures, from any worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from container.front_end.app import create_app
from container.wire.engine_client import EngineClient
from core.messages import Step, Submit
from core.options import Options
from core.output import Output
from core.sampling import Finish
from core.stats import Durations, Stats, Timing
from core.text.tokenizer import Tokenizer
from tests.container.conftest import eventually
from tests.container.fake_engine import FACTS, FakeEngine

STATS = Stats(
    num_running=3, num_waiting=2, num_held_blocks=10, num_filled_tokens=120, num_steps=9,
    num_step_sequences=20, num_step_tokens=40, num_prompt_tokens=50, num_generated_tokens=60,
    num_prefix_queries=70, num_prefix_hits=30, num_swaps=1, num_recomputes=4,
    finished={"length": 5, "eos_token": 1},
)  # fmt: skip


def samples(http: FlaskClient) -> dict[str, float]:
    """Return values by name, followed by labels other than model and strategy."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.mimetype == "text/plain"
    found = {}
    for family in text_string_to_metric_families(response.get_data(as_text=True)):
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            assert sample.labels["batching"] == FACTS.batching
            own = [v for k, v in sample.labels.items() if k not in ("model_name", "batching")]
            found[":".join([sample.name, *own])] = sample.value
    return found


def test_metrics_have_the_engines_values(
    http: FlaskClient, engine: FakeEngine, client: EngineClient
) -> None:
    stats = STATS
    stats.queue = Durations()
    for seconds in (0.2, 0.3, 1000.0):
        stats.queue.add(seconds)
    engine.stats = stats
    eventually(lambda: client.stats.num_running == 3)
    found = samples(http)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 10 / FACTS.num_kv_blocks
    assert found["longshore:kv_blocks"] == FACTS.num_kv_blocks
    assert found["longshore:kv_tokens_filled"] == 120
    assert found["vllm:prompt_tokens_total"] == 50
    assert found["vllm:generation_tokens_total"] == 60
    assert found["vllm:prefix_cache_queries_total"] == 70
    assert found["vllm:prefix_cache_hits_total"] == 30
    assert found["vllm:num_preemptions_total"] == 5
    assert found["longshore:preemptions_total:swap"] == 1
    assert found["vllm:request_success_total:length"] == 5
    assert found["vllm:request_queue_time_seconds_bucket:0.1"] == 0
    assert found["vllm:request_queue_time_seconds_bucket:0.25"] == 1
    assert found["vllm:request_queue_time_seconds_bucket:0.5"] == 2
    assert found["vllm:request_queue_time_seconds_bucket:+Inf"] == 3
    assert found["vllm:request_queue_time_seconds_sum"] == pytest.approx(1000.5)


def test_every_worker_reports_the_same(
    http: FlaskClient,
    engine: FakeEngine,
    client: EngineClient,
    endpoint: str,
    tokenizer: Tokenizer,
) -> None:
    """One worker that served the requests and one that never had any."""
    other = EngineClient(endpoint, heartbeat_timeout_s=60)
    try:
        engine.stats = STATS
        eventually(lambda: client.stats.num_steps == other.stats.num_steps == 9)
        theirs = create_app(other, tokenizer, Options(), "demo").test_client()
        assert samples(http) == samples(theirs)
    finally:
        other.close()


def test_no_metrics_before_the_engine_is_ready(http: FlaskClient, engine: FakeEngine) -> None:
    engine.ready = False
    engine.die()
    eventually(lambda: http.get("/metrics").status_code == 503)


@pytest.mark.parametrize("stream", [False, True])
def test_timings_are_returned_on_request(
    http: FlaskClient, engine: FakeEngine, stream: bool
) -> None:
    timing = Timing(arrived=1.0, admitted=2.0, first_token=3.0, finished=5.0)

    def script(submit: Submit) -> Any:
        yield Step([(submit.id, Output(0, (65,), (-0.5,)))])
        yield Step([(submit.id, Output(0, (66,), (-0.5,), Finish.LENGTH, timing=timing))])

    engine.script = script

    def details(**parameters: bool) -> dict[str, Any]:
        body = {"inputs": "Q", "parameters": {"details": True, **parameters}, "stream": stream}
        last = http.post("/invocations", json=body).get_data().splitlines()[-1]
        return json.loads(last)["details"]

    assert "timings" not in details()
    expected = {"arrived": 1.0, "admitted": 2.0, "first_token": 3.0, "finished": 5.0}
    assert details(timings=True)["timings"] == expected
