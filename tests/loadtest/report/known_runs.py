"""Load-test runs with known figures."""

from __future__ import annotations

from typing import Any

from loadtest.load.record import Record, Timings
from loadtest.servers.watch import Sample
from loadtest.study.measures import measures_of, quantiles
from loadtest.study.results import Results, Run
from loadtest.study.tuning import TUNED, Trial


def record(index: int, start: float = 0.0, length: float = 2.0, **changes: Any) -> Record:
    """A request that is queued for a quarter of its time and gets its first token half-way."""
    timings = Timings(
        arrived=100 + start,
        admitted=100 + start + length / 4,
        first_token=100 + start + length / 2,
        finished=100 + start + length,
    )
    values: dict[str, Any] = {
        "index": index, "prompt_tokens": 20, "asked_tokens": 10, "sent_s": start,
        "first_s": start + length / 2, "finished_s": start + length, "output_tokens": 10,
        "stall_s": 0.1, "timings": timings,
    }  # fmt: skip
    return Record(**(values | changes))


def sample(at_s: float, **metrics: float) -> Sample:
    values = {
        "running": 2.0, "waiting": 1.0, "kv_used": 0.5, "kv_blocks": 100.0,
        "kv_block_tokens": 16.0, "kv_tokens_filled": 400.0, "steps": 10 * at_s,
        "step_sequences": 25 * at_s, "preemptions": at_s, "prefix_queries": 40 * at_s,
        "prefix_hits": 10 * at_s,
    }  # fmt: skip
    return Sample(
        at_s=at_s, metrics=values | metrics, server_cpu=1.5, client_cpu=0.1, machine_cpu=1.7
    )


def run(name: str = "paged", seconds: float = 2.0, **changes: Any) -> Run:
    """Four users send two requests each, one after the other. Each request takes `seconds`."""
    records = [record(4 * at + user, at * seconds, seconds) for at in range(2) for user in range(4)]
    samples = [sample(at * seconds / 2) for at in range(5)]
    values: dict[str, Any] = {
        "name": name, "workload": "aws", "loop": "closed loop: 4 users", "users": 4, "rate": None,
        "num_left_out": 0, "tokens_per_word": 1.0, "start_s": 5.0, "warm_up_s": 1.0,
        "settings": {"option.batching": name}, "is_whole": True, "records": records,
        "samples": samples, "gap_quantiles_s": quantiles([0.01, 0.02, 0.1]),
    }  # fmt: skip
    values |= changes
    values["measures"] = changes.get("measures") or measures_of(
        values["records"], [0.01, 0.02, 0.1], values["samples"], clients=values["users"]
    )
    return Run(**values)


def results(*runs: Run, **changes: Any) -> Results:
    values: dict[str, Any] = {
        "command": "python -m loadtest compare --out x", "created": "2026-11-21T16:00:00+00:00",
        "seed": 0, "machine": {"processor": "one", "GPU": "none"}, "runs": list(runs),
    }  # fmt: skip
    return Results(**(values | changes))


def rounds(name: str, *seconds: float, **changes: Any) -> list[Run]:
    """Runs of one server, one run per round. seconds: how long a request takes in each round."""
    return [run(name, length, round=at, **changes) for at, length in enumerate(seconds, 1)]


def compared() -> Results:
    """Three rounds in which each strategy is twice as fast as the one before, and a variant."""
    strategies = ("none", "dynamic", "continuous", "paged")
    runs = [
        entry
        for at, name in enumerate(strategies)
        for entry in rounds(name, *(length / 2**at for length in (15.0, 16.0, 17.0)))
    ]
    return results(*runs, *rounds("dynamic", 4.0, 4.0, 4.0, variant="all answers 32 tokens"))


def swept() -> Results:
    runs = [run(name, seconds=rate, rate=rate, users=None) for name in ("continuous", "paged")
            for rate in (1.0, 2.0, 4.0)]  # fmt: skip
    return results(*runs, slo={"ttft_p99": 1.5, "itl_p99": 0.2})


def tuned() -> Results:
    """Runs of dynamic batching as given and with the better of two settings, and runs of paged."""
    given = {"option.batching": "dynamic", "batch_size": "64", "max_batch_delay": "1000"}
    found = given | {"batch_size": "16", "max_batch_delay": "10"}
    trials = [
        Trial(workload="aws", settings=settings, is_given=settings == given, requests_per_s=rate)
        for settings, rate in ((given, 1.5), (found, 2.5))
    ]
    runs = [
        *rounds("dynamic", 4.0, 4.0, 4.0, settings=given),
        *rounds("dynamic", 3.0, 3.0, 3.0, settings=given, variant="all answers 32 tokens"),
        *rounds(TUNED, 2.0, 2.0, 2.0, settings=found),
        *rounds("paged", 1.0, 1.0, 1.0),
    ]
    return results(*runs, trials=trials)


def in_an_open_loop(pace: float, latency_s: float, name: str) -> list[Run]:
    """Three rounds of one server in which all requests take equally long."""
    runs = rounds(name, *3 * [latency_s])
    for server_run in runs:
        server_run.measures.pace = pace
    return runs
