"""Statistics in CloudWatch's embedded metric format."""

from __future__ import annotations

import json
import threading

import pytest

from core.protocol.messages import Submit
from core.protocol.stats import Durations, Stats
from core.sampling import SamplingParams
from engine.engine import Engine
from engine.serve.connection import Connection
from engine.serve.emf import EmfReporter
from engine.serve.server import Server
from engine.serve.text_service import TextService
from tests.engine.serve.serving import FACTS, Client, Gate, Stop
from tests.strategies.fakes import strategy_of


def stats(num_generated, seconds=(), **changes):
    durations = Durations()
    for value in seconds:
        durations.add(value)
    return Stats(num_generated_tokens=num_generated, first_token=durations, **changes)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def reporter(lines):
    def write(line):
        lines.append(json.loads(line))

    return EmfReporter("demo", 60.0, write=write, unix_time=lambda: 1_700_000_000.5)


def test_a_line_declares_every_metric_it_holds(reporter, lines):
    reporter.tick(FACTS, Stats(), 0.0)
    reporter.tick(FACTS, stats(7, [2.0], num_held_blocks=16), 60.0)
    [line] = lines
    metadata = line.pop("_aws")
    assert metadata["Timestamp"] == 1_700_000_000_500
    [directive] = metadata["CloudWatchMetrics"]
    assert directive["Namespace"] == "Longshore"
    assert directive["Dimensions"] == [["ModelName", "Batching"]]
    units = {metric["Name"]: metric["Unit"] for metric in directive["Metrics"]}
    assert line.keys() == {"ModelName", "Batching", *units}
    assert (line["ModelName"], line["Batching"]) == ("demo", "paged")
    assert (line["KVCacheUsage"], units["KVCacheUsage"]) == (25.0, "Percent")
    assert (line["GenerationTokens"], units["GenerationTokens"]) == (7, "Count")
    assert (line["TimeToFirstToken"], units["TimeToFirstToken"]) == (2.0, "Seconds")
    assert "InterTokenLatency" not in line, "a metric without values is left out"


def test_each_line_has_the_growth_since_the_last_one(reporter, lines):
    reporter.tick(FACTS, Stats(), 0.0)
    reporter.tick(FACTS, stats(7, [2.0], finished={"stop": 1}, refused={"invalid": 2}), 60.0)
    later = stats(
        10, [2.0, 4.0, 6.0], num_running=3, finished={"stop": 1, "length": 2, "error": 4},
        aborted={"timeout": 1}, refused={"invalid": 2},
    )  # fmt: skip
    for now in (61.0, 119.9, 120.0, 121.0):
        reporter.tick(FACTS, later, now)
    first, second = lines
    assert (first["GenerationTokens"], second["GenerationTokens"]) == (7, 3)
    assert (first["RequestsRefused"], second["RequestsRefused"]) == (2, 0)
    assert (second["RequestsFinished"], second["RequestsFailed"]) == (2, 4)
    assert (second["RequestsRunning"], second["RequestsAborted"]) == (3, 1)
    assert second["TimeToFirstToken"] == 5.0


def test_the_server_reports_also_while_it_is_idle(tmp_path, lines):
    """The line written after the last request counts it, though nothing runs any more."""
    reported = threading.Event()

    def write(line):
        lines.append(json.loads(line))
        if sum(line["RequestsFinished"] for line in lines) == 1:
            reported.set()

    gate = Gate()
    engine = Engine(strategy_of("paged"), gate, FACTS)
    with Connection(f"ipc://{tmp_path}/e") as connection:
        server = Server(
            TextService(engine, connection),
            connection,
            8,
            reporter=EmfReporter("demo", 0.01, write=write),
        )

        def serve():
            with pytest.raises(Stop):
                server.serve_forever()

        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(connection.endpoint)
        client.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)))
        assert reported.wait(60)
        gate.error = Stop()
        client.send(Submit("b", [1, 2, 3], SamplingParams(max_tokens=4)))
        thread.join(60)
        client.close()
    assert sum(line["GenerationTokens"] for line in lines) == 4
    assert lines[-1]["RequestsRunning"] == 0
