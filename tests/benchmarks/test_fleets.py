"""Simulated fleets and what they cost: `python -m benchmarks.fleets`."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.fleets.__main__ import main
from benchmarks.fleets.capacity import ROUTINGS, BySession, Service, sustained_rate
from benchmarks.fleets.study import Row, table
from benchmarks.load.lengths import Lengths
from benchmarks.simulate.cost import GPUS, MODELS, Hardware
from benchmarks.simulate.fleet import Fleet
from benchmarks.simulate.system import SYSTEMS, Setup
from benchmarks.simulate.traffic import Arrival, Prefixes, Superposed
from core.routing import LeastLoaded, RoutedRequest

ROWS = [(float(second), Lengths(50 + 10 * second, 10)) for second in range(20)]
SERVICE = Service(
    trace=ROWS, max_length=4096, prefixes=Prefixes(2, 1024), duration_s=2.0, bound=0.2
)
A10G = Hardware(MODELS["llama-3.1-8b"], GPUS["a10g"])


def mean_latency(routing, num_machines, rate):
    arrivals = SERVICE.traffic(num_machines, 0).arrivals(rate, SERVICE.duration_s)
    setup, router = SERVICE.setup(A10G), ROUTINGS[routing]()
    served = Fleet(setup, SYSTEMS["paged"], arrivals, router, num_machines, report_s=0.25)
    return served.run().figures.normalized_latency


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [
        f"2023-11-16 18:00:{second:02.0f}.1234567,{lengths.prompt},{lengths.generated}"
        for second, lengths in ROWS
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


@pytest.fixture
def command(trace, capsys):
    def run(*arguments):
        main(["--trace", str(trace), "--duration", "0.5", "--rounds", "2", *arguments])
        return capsys.readouterr()

    return run


def test_a_machine_that_may_run_few_sequences_sustains_less():
    few = replace(SERVICE, max_sequences=1)
    rates = [sustained_rate(service, A10G, 1, "prefix-aware") for service in (few, SERVICE)]
    assert 0 < rates[0] < rates[1]


def test_a_service_starts_the_trace_again_after_its_end():
    traffic = Superposed(ROWS, 4096, num_services=1)
    assert traffic.rate == 1.0
    lap = [arrival.lengths for arrival in traffic.arrivals(1.0, 20.0)]
    assert sorted(lengths.prompt for lengths in lap) == [row[1].prompt for row in ROWS]
    twice = traffic.arrivals(2.0, 20.0)
    assert [arrival.lengths for arrival in twice] == lap * 2
    gaps = {round(b.at_s - a.at_s, 9) for a, b in pairwise(twice)}
    assert gaps == {0.5}


def test_each_service_starts_elsewhere_in_the_trace():
    arrivals = Superposed(ROWS, 4096, num_services=8).arrivals(8.0, 20.0)
    assert len(arrivals) == 8 * 20
    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)
    assert len({arrival.lengths.prompt for arrival in arrivals[:8]}) > 4


def test_between_two_reports_the_router_counts_what_it_has_sent():
    """The first machine has long been idle at the second request, but has not said so."""
    requests = [Arrival(id, at_s, Lengths(20, 2)) for id, at_s in enumerate((0.0, 5.0, 20.0))]
    setup = Setup(hardware=Hardware(MODELS["llama-3.1-8b"], GPUS["h100"]))
    loads = [
        Fleet(setup, SYSTEMS["paged"], requests, LeastLoaded(), 2, report_s=report_s).run().loads
        for report_s in (0.0, 10.0)
    ]
    assert loads == [(3, 0), (2, 1)]


def test_stale_reports_change_no_latency_of_a_single_machine():
    requests = Superposed(ROWS, 4096, num_services=1).arrivals(4.0, 20.0)
    setup = Setup(hardware=Hardware(MODELS["llama-3.1-8b"], GPUS["a10g"]))
    outcomes = [
        Fleet(setup, SYSTEMS["paged"], requests, LeastLoaded(), report_s=report_s).run()
        for report_s in (0.0, 0.25)
    ]
    assert outcomes[0].figures == outcomes[1].figures


def test_a_session_stays_at_its_machine_under_any_load():
    router = BySession()
    first = router.choose(RoutedRequest(None, (7,)), {"a": 3, "b": 0})
    assert [first, router.choose(RoutedRequest(None, (7,)), {"a": 0, "b": 99})] == ["b", "b"]


def test_the_table_has_rates_and_requests_per_dollar():
    rows = [
        Row("a10g", 1, 2.0, "round-robin", (1.0, 3.0)),
        Row("a10g", 1000, 2000.0, "round-robin", (4000.0,)),
    ]
    assert table(rows)[2:] == [
        "| a10g | 1 | 2.00 | 2 (1 to 3) | 3,600 |",
        "| a10g | 1,000 | 2,000.00 | 4,000 | 7,200 |",
    ]


def test_the_command_prints_a_row_for_each_fleet(command, tmp_path):
    out = tmp_path / "out.json"
    found = command("--prices", "a10g=1.5,2xa10g=4", "--sizes", "1,2", "--json", str(out))
    assert found.out.startswith("SIMULATION: llama-3.1-8b, paged; trace.csv (0 requests over 4096")
    assert not found.err, "no progress bar without a terminal"
    cells = [line.split(" | ") for line in found.out.splitlines()[4:]]
    assert [row[:3] for row in cells] == [
        ["| a10g", "1", "1.50"], ["| a10g", "2", "3.00"],
        ["| 2 x a10g", "1", "4.00"], ["| 2 x a10g", "2", "8.00"],
    ]  # fmt: skip
    written = json.loads(out.read_text())["rows"]
    assert [len(row["rates"]) for row in written] == [2, 2, 2, 1, 1, 1] * 2
    assert all(min(row["rates"]) > 0 for row in written)


def test_an_interrupted_study_goes_on_with_the_next_fleet(command, tmp_path):
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    arguments = ("--prices", "a10g=2", "--sizes", "1,2,4")
    table = command(*arguments, "--json", str(whole)).out
    found = json.loads(whole.read_text())
    del found["rows"][5:]
    found["rows"][0]["rates"] = [40.0, 60.0]  # would be another number if it were simulated again
    part.write_text(json.dumps(found))
    continued = command(*arguments, "--json", str(part)).out
    assert continued.splitlines()[4].startswith("| a10g | 1 | 2.00 | 50 (40 to 60) |")
    assert continued.splitlines()[5:] == table.splitlines()[5:]


def test_results_of_other_settings_are_not_mixed(command, capsys, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("--prices", "a10g=2", "--sizes", "1", "--json", str(out))
    command(*arguments)
    first = out.read_text()
    with pytest.raises(SystemExit):
        command(*arguments, "--bound", "0.2")
    assert "bound 0.1" in capsys.readouterr().err
    assert out.read_text() == first
    command(*arguments, "--prices", "a10g=4", "--sizes", "2", "--routings", "sessions")
    rows = json.loads(out.read_text())["rows"]
    assert [row["num_machines"] for row in rows] == [1, 1, 1, 2]


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_file_of_another_kind_is_not_overwritten(command, capsys, tmp_path, text):
    out = tmp_path / "notes.json"
    out.write_text(text)
    with pytest.raises(SystemExit):
        command("--prices", "a10g=1", "--json", str(out))
    assert "name another file" in capsys.readouterr().err
    assert out.read_text() == text


def test_a_rate_is_sustained_and_a_much_higher_one_is_not():
    rate = sustained_rate(SERVICE, A10G, 2, "round-robin")
    assert mean_latency("round-robin", 2, rate) <= SERVICE.bound
    assert mean_latency("round-robin", 2, 1.2 * rate) > SERVICE.bound
    near = sustained_rate(SERVICE, A10G, 2, "round-robin", near=0.8 * rate)
    assert near == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("routing", ["sessions", "prefix-aware"])
def test_latency_is_lower_if_a_prefix_returns_to_the_machine_that_cached_it(routing):
    """With round robin, each of eight machines has to compute nearly every prefix itself."""
    assert mean_latency(routing, 8, 16.0) < 0.8 * mean_latency("round-robin", 8, 16.0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--prices", "a10g"], "expected [Nx]GPU=DOLLARS"),
        (["--prices", "a10g=0"], "must be greater than 0"),
        (["--prices", "0xa10g=1"], "must be at least 1"),
        (["--prices", "v100=1"], "v100: no such GPU; choose from a10g"),
        (["--prices", "a10g=1", "--sizes", "1,two"], "such as 1,8,64"),
        (["--prices", "a10g=1", "--routings", "random"], "choose from round-robin"),
        (["--prices", "a10g=1", "--model", "opt-66b"], "use more GPUs"),
        (["--prices", "a10g=1", "--prefix-tokens", "5000"], "--prefix-tokens 5000"),
        (["--prices", "a10g=1", "--trace", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_invalid_arguments_are_rejected(command, capsys, arguments, why):
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    assert stopped.value.code == 2
    assert why in capsys.readouterr().err


def test_the_help_names_every_routing(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in ROUTINGS)
