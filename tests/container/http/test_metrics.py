"""`/metrics`: the engine's figures, from any worker."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from container.front_end.app import create_app
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.output import Output
from core.protocol.messages import Refused, Step, Submit
from core.protocol.stats import Durations, Info, Stats, Timing, Total
from core.sampling import Finish
from core.text.tokenizer import Tokenizer
from tests.container.conftest import Serve, eventually
from tests.container.fake_engine import FACTS, FakeEngine, fails, says

STATS = Stats(
    num_running=3, num_waiting=2, waiting={"blocks": 2}, num_held_blocks=10,
    num_filled_tokens=120, num_steps=9, num_step_sequences=20, host_s=0.75, num_prompt_tokens=50,
    num_generated_tokens=60,
    num_prefix_queries=70, num_prefix_hits=30, num_swaps=1, num_recomputes=4,
    finished={"length": 5, "stop": 1}, aborted={"disconnect": 3}, refused={"invalid": 8},
)  # fmt: skip


def samples(http: FlaskClient) -> dict[str, float]:
    """Return the samples' values. A key is the sample's name and the values of its labels, without
    those of the model and the batching strategy.
    """
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
    eventually(lambda: client.copies[0].state.stats.num_running == 3)
    found = samples(http)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:num_requests_waiting_by_reason:capacity"] == 2
    assert found["vllm:num_requests_waiting_by_reason:deferred"] == 0
    assert found["longshore:requests_waiting:blocks"] == 2
    assert found["longshore:requests_waiting:slots"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 10 / FACTS.num_kv_blocks
    assert found["longshore:kv_blocks"] == FACTS.num_kv_blocks
    assert found["longshore:kv_tokens_filled"] == 120
    assert found["longshore:host_seconds_total"] == 0.75
    assert found["vllm:prompt_tokens_total"] == 50
    assert found["vllm:generation_tokens_total"] == 60
    assert found["vllm:prefix_cache_queries_total"] == 70
    assert found["vllm:prefix_cache_hits_total"] == 30
    assert found["vllm:num_preemptions_total"] == 5
    assert found["longshore:preemptions_total:swap"] == 1
    assert found["vllm:request_success_total:length"] == 5
    assert found["longshore:requests_aborted_total:disconnect"] == 3
    assert found["longshore:requests_refused_total:invalid"] == 8
    assert found["vllm:request_queue_time_seconds_bucket:0.1"] == 0
    assert found["vllm:request_queue_time_seconds_bucket:0.25"] == 1
    assert found["vllm:request_queue_time_seconds_bucket:0.5"] == 2
    assert found["vllm:request_queue_time_seconds_bucket:+Inf"] == 3
    assert found["vllm:request_queue_time_seconds_sum"] == pytest.approx(1000.5)


VLLM_HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_time_per_output_token_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_params_n", "request_params_max_tokens", "iteration_tokens_total",
)  # fmt: skip


def test_every_histogram_of_vllm_is_there(http: FlaskClient) -> None:
    found = samples(http)
    for name in VLLM_HISTOGRAMS:
        assert found[f"vllm:{name}_count"] == found[f"vllm:{name}_bucket:+Inf"] == 0
    assert "vllm:request_prompt_tokens_bucket:200.0" in found


def infos(http: FlaskClient, name: str) -> list[dict[str, str]]:
    """Return the labels of a metric's samples."""
    families = text_string_to_metric_families(http.get("/metrics").get_data(as_text=True))
    return [
        sample.labels for family in families if family.name == name for sample in family.samples
    ]


def test_the_cache_and_the_engines_infos_are_labels(
    serve: Serve, engine: FakeEngine, client: EngineClient
) -> None:
    http = serve()
    engine.stats = Stats(infos=(Info("vllm:lora_requests_info", "", {"max_lora": "3"}),),
                         totals=(Total("vllm:spec_decode_num_accepted_tokens_per_pos", "",
                                       {"0": 5, "1": 2}, "position"),))  # fmt: skip
    eventually(lambda: client.copies[0].state.stats.infos)
    [cache] = infos(http, "vllm:cache_config_info")
    assert (cache["block_size"], cache["num_gpu_blocks"], cache["num_cpu_blocks"]) == (
        "16",
        "40",
        "0",
    )
    assert (cache["cache_dtype"], cache["enable_prefix_caching"]) == ("float32", "True")
    [lora] = infos(http, "vllm:lora_requests_info")
    assert lora["max_lora"] == "3"
    accepted = infos(http, "vllm:spec_decode_num_accepted_tokens_per_pos")
    assert [labels["position"] for labels in accepted] == ["0", "1"]


@pytest.mark.parametrize("overload_status", ["503", "429"])
def test_refused_requests_reach_the_engine_by_reason(
    serve: Serve, engine: FakeEngine, overload_status: str
) -> None:
    http = serve(overload_status=overload_status)
    http.post("/invocations", json={"inputs": 1})
    http.post("/invocations", data=b"{")
    http.get("/no/such/path")
    engine.script = fails("overloaded", "full")
    refused = http.post("/invocations", json={"inputs": "Q"})
    assert refused.status_code == refused.json["code"] == int(overload_status)
    assert refused.headers["Retry-After"] == "1"
    engine.script = says([65])
    http.post("/invocations", json={"inputs": "Q"})

    def counted() -> dict[str, int]:
        total: Counter[str] = Counter()
        for message in engine.of_type(Refused):
            assert isinstance(message, Refused)
            total.update(message.counts)
        return dict(total)

    eventually(lambda: counted() == {"invalid": 2, "not_found": 1, "overloaded": 1})


def test_failed_health_checks_do_not_count_as_refused_requests(
    http: FlaskClient, engine: FakeEngine, client: EngineClient
) -> None:
    engine.step_age_s = 100.0
    eventually(lambda: http.get("/ping").status_code == 503)
    engine.stats = Stats(num_running=1)
    eventually(lambda: client.copies[0].state.stats.num_running == 1)
    assert engine.of_type(Refused) == []


def test_every_worker_reports_the_same(
    http: FlaskClient,
    engine: FakeEngine,
    client: EngineClient,
    endpoint: str,
    tokenizer: Tokenizer,
) -> None:
    """The figures are the engine's, so it does not matter which worker served the requests."""
    other = EngineClient(endpoint, heartbeat_timeout_s=60)
    try:
        engine.stats = STATS
        eventually(
            lambda: (
                client.copies[0].state.stats.num_steps == other.copies[0].state.stats.num_steps == 9
            )
        )
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
