"""The order of runs, their repetition, and the search for a setting. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from core.configuration.batching import DEFAULT_BATCH_SIZE
from core.configuration.options import Options
from loadtest.load.request import Words
from loadtest.load.request_plan import Load, make_plan, most_sequences
from loadtest.load.workloads import WORKLOADS
from loadtest.study.compare import Comparison, announced, for_trial, turns
from loadtest.study.results import Run
from loadtest.study.tuning import DEFAULT, TUNED, Setting, Trial, best_setting, given_setting
from tests.loadtest.report.known_runs import run

ARTICLE = Setting(64, 1000)
"""The setting in the properties of these tests. It is the one of AWS's article."""


class Endpoint:
    def words(self) -> Words:
        return Words()

    def max_length(self) -> int:
        return 1000


@dataclass
class Opened:
    name: str
    setting: Setting | None
    endpoint: Endpoint = field(default_factory=Endpoint)


@dataclass
class Servers:
    names: tuple[str, ...]
    keeps_servers: bool
    given_setting: Setting = ARTICLE
    started: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)

    @contextmanager
    def open(self, name: str, setting: Setting | None = None) -> Iterator[Opened]:
        self.started.append(name)
        self.running.add(name)
        yield Opened(name, setting)
        self.running.remove(name)


@dataclass
class Measurement:
    """Stands in for `measure`. No time passes."""

    other_cores: list[float] = field(default_factory=list)
    """How many cores other processes use in each run, in the order of the runs; then 0."""
    seconds: dict[Setting | None, float] = field(default_factory=dict)
    """How long a request takes with a setting of dynamic batching."""
    loads: list[tuple[str, Load]] = field(default_factory=list)

    def __call__(self, subject: Opened, workload: Any, load: Load, *_: Any, **__: Any) -> Run:
        self.loads.append((subject.name, load))
        done = run(subject.name, self.seconds.get(subject.setting, 2.0), workload=workload.name)
        done.measures.other_cpu = self.other_cores.pop(0) if self.other_cores else 0.0
        return done


def comparison_of(servers: Servers, measurement: Measurement, said: list[str]) -> Comparison:
    return Comparison(
        servers,  # pyright: ignore[reportArgumentType]
        Load(num_requests=10, users=2),
        num_warm_up=0,
        measure=measurement,
        say=said.append,
    )


def compared(
    servers: Servers, measurement: Measurement, rounds: int = 3
) -> tuple[list[Run], list[str]]:
    """Return the runs, and the messages about runs that are measured again."""
    said: list[str] = []
    with comparison_of(servers, measurement, said) as comparison:
        runs = list(comparison.rounds(WORKLOADS["chat"], rounds, None))
    return runs, [line for line in said if "again" in line]


@pytest.mark.parametrize("keeps", [True, False])
def test_each_round_begins_with_another_server(keeps: bool) -> None:
    servers = Servers(("none", "dynamic", "paged"), keeps)
    runs, _ = compared(servers, Measurement())
    order = [[entry.name for entry in runs if entry.round == number] for number in (1, 2, 3)]
    assert order == [
        ["none", "dynamic", "paged"],
        ["dynamic", "paged", "none"],
        ["paged", "none", "dynamic"],
    ]
    assert servers.started == (order[0] if keeps else list(chain(*order)))
    assert not servers.running


@pytest.mark.parametrize(("keeps", "num_started"), [(True, 1), (False, 3)])
def test_a_disturbed_run_is_measured_again_and_the_quietest_counts(
    keeps: bool, num_started: int
) -> None:
    """The run is repeated on the same server."""
    measurement = Measurement([0.9, 0.3, 0.5, 0.1, 0.7, 0.0])
    servers = Servers(("paged",), keeps)
    runs, said = compared(servers, measurement)
    assert len(servers.started) == num_started
    assert [entry.measures.other_cpu for entry in runs] == [0.3, 0.1, 0.0]
    assert [entry.num_discarded for entry in runs] == [2, 0, 1]
    assert len(said) == 3


def test_a_run_is_measured_at_most_three_times() -> None:
    measurement = Measurement([0.9, 0.8, 0.7, 0.1, 0.6, 0.5, 0.4, 0.1, 0.5, 0.0])
    runs, said = compared(Servers(("none", "dynamic", "paged"), True), measurement)
    assert [entry.measures.other_cpu for entry in runs[:5]] == [0.7, 0.1, 0.4, 0.1, 0.0]
    assert [entry.num_discarded for entry in runs] == [2, 0, 2, 0, 1, 0, 0, 0, 0]
    assert len(said) == 5


@pytest.mark.parametrize(
    ("names", "other_cores", "num_rounds"),
    [
        (("none", "paged"), [0.9, 0.9, 0.9, 0.9], 1),
        (("none", "paged"), [0.9, 0.9, 0.9, 0.1], 3),
        (("none", "paged"), [0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.1], 2),
        (("paged",), [0.9, 0.9, 0.9], 3),
    ],
)
def test_no_round_follows_once_every_server_was_disturbed(
    names: tuple[str, ...], other_cores: list[float], num_rounds: int
) -> None:
    """No further round could name a winner. A single server needs no winner: its rounds go on."""
    runs, _ = compared(Servers(names, True), Measurement(other_cores))
    assert runs[-1].round == num_rounds
    assert len(runs) == num_rounds * len(names), "the last round is whole"


def test_rounds_and_attempts_differ_in_words_alone() -> None:
    measurement = Measurement([0.9])
    compared(Servers(("none", "paged"), True), measurement, rounds=2)
    by_name: dict[str, list[Load]] = {"none": [], "paged": []}
    for name, load in measurement.loads:
        by_name[name].append(load)
    disturbed, again, _ = (make_plan(WORKLOADS["chat"], load, Words()) for load in by_name["none"])
    first, second = (make_plan(WORKLOADS["chat"], load, Words()) for load in by_name["paged"])
    assert first == disturbed, "all servers get the same requests in a round"
    for other in (again, second):
        assert [request.shape for request in other.requests] == [
            request.shape for request in first.requests
        ]
        assert [request.due_s for request in other.requests] == [
            request.due_s for request in first.requests
        ]
        assert not {request.prompt for request in other.requests} & {
            request.prompt for request in first.requests
        }


@pytest.mark.parametrize(
    ("fast", "found"),
    [
        (Setting(16, 10), Setting(16, 10)),
        (Setting(64, 100), Setting(64, 100)),
        (ARTICLE, ARTICLE),
        (Setting(1000, 1), ARTICLE),
    ],
)
def test_the_search_finds_the_fastest_setting_it_tries(fast: Setting, found: Setting) -> None:
    """The fastest setting serves 10 requests/s, and the given one 2.

    The others serve 1.5 if they have the batch size of the fastest, and 1 if not.
    """
    tried: list[Setting] = []

    def rate_of(setting: Setting) -> float:
        tried.append(setting)
        if setting == fast:
            return 10.0
        return 2.0 if setting == ARTICLE else 1.0 + (setting.batch_size == fast.batch_size) / 2

    assert best_setting(rate_of, ARTICLE) == found
    assert tried[0] == ARTICLE
    assert len(tried) == len(set(tried)) == 5


@pytest.mark.parametrize("given", [DEFAULT, Setting(64, 100), Setting(16, 10)])
def test_the_given_setting_is_tried_once(given: Setting) -> None:
    """A second measurement of the given setting would only compare noise."""
    tried: list[Setting] = []

    def rate_of(setting: Setting) -> float:
        tried.append(setting)
        return {given: 9.0}.get(setting, 1.0)

    assert best_setting(rate_of, given) == given
    assert sorted(map(str, tried)) == sorted(set(map(str, tried)))


def test_no_batch_is_larger_than_what_the_clients_send() -> None:
    tried: list[Setting] = []

    def rate_of(setting: Setting) -> float:
        tried.append(setting)
        return float(len(tried))

    assert best_setting(rate_of, ARTICLE, 24) == Setting(24, 10)
    assert tried == [ARTICLE, Setting(16, 100), Setting(24, 100), Setting(24, 10)]


def test_the_given_setting_is_that_of_the_properties_or_the_default() -> None:
    assert (
        Setting(
            Options().strategy.batch_size or DEFAULT_BATCH_SIZE, Options().strategy.max_batch_delay
        )
        == DEFAULT
    )
    assert given_setting({}) == DEFAULT
    assert given_setting({"batch_size": "8", "max_batch_delay": "5"}) == Setting(8, 5)
    assert given_setting({"batch_size": "8"}) == Setting(8, DEFAULT.delay_ms)


@pytest.mark.parametrize(
    ("workload", "rate", "most"),
    [("aws", None, 10), ("parallel", None, 40), ("beam", None, 40), ("aws", 2.0, None),
     ("chat", None, None)],
)  # fmt: skip
def test_a_closed_loop_bounds_the_sequences(
    workload: str, rate: float | None, most: int | None
) -> None:
    load = Load(num_requests=20, users=10, rate=rate)
    assert most_sequences(WORKLOADS[workload], load) == most


@pytest.mark.parametrize("keeps", [True, False])
def test_a_trial_sends_half_of_the_requests_and_no_server_is_left(keeps: bool) -> None:
    servers = Servers(("none", "dynamic"), keeps)
    measurement = Measurement(seconds={Setting(32, 100): 0.5})
    trials: list[Trial] = []
    with comparison_of(servers, measurement, []) as comparison:
        tuned = comparison.tune(WORKLOADS["chat"], trials.append)
        assert servers.running == ({"dynamic"} if keeps else set())
        assert [trial.is_given for trial in trials] == [True] + 4 * [False]
        for turn in turns(WORKLOADS["chat"], servers.names, 1, tuned):
            comparison.run(turn)
    assert tuned == Setting(32, 100)
    assert len(trials) == 5
    assert {load.num_requests for _, load in measurement.loads[: len(trials)]} == {5}
    assert [load.num_requests for _, load in measurement.loads[len(trials) :]] == [10] * 3
    assert not servers.running


def test_a_trial_takes_half_of_the_seconds() -> None:
    load = for_trial(Load(num_requests=10, users=2, seconds=3.0))
    assert (load.seconds, load.num_requests) == (1.5, 10)


def test_the_server_tuned_for_a_workload_ends_with_it() -> None:
    servers = Servers(("dynamic",), True)
    measurement = Measurement(seconds={Setting(32, 100): 0.5})
    with comparison_of(servers, measurement, []) as comparison:
        for _ in range(2):
            tuned = comparison.tune(WORKLOADS["chat"], [].append)
            assert servers.running == {"dynamic"}
            for turn in turns(WORKLOADS["chat"], servers.names, 1, tuned):
                comparison.run(turn)
            assert servers.running == {"dynamic", TUNED}
    assert not servers.running


def test_the_tuned_setting_runs_after_the_given_one_in_every_round() -> None:
    order = turns(WORKLOADS["aws"], ["none", "dynamic"], 2, Setting(32, 10))
    assert [(turn.round, turn.name, turn.fixed_output) for turn in order] == [
        (1, "none", None), (1, "dynamic", None), (1, "dynamic", 128), (1, TUNED, None),
        (2, "dynamic", None), (2, "dynamic", 128), (2, TUNED, None), (2, "none", None),
    ]  # fmt: skip


def test_each_run_is_announced_with_the_time_that_is_left() -> None:
    planned = list(turns(WORKLOADS["chat"], ["none", "paged"], 2))
    seconds = chain([0.0], [100.0, 150.0, 180.0])
    said: list[str] = []
    assert list(announced(planned, said.append, lambda: next(seconds))) == planned
    assert said == [
        "chat, run 1 of 4: none",
        "chat, run 2 of 4: paged, about 5 min left",
        "chat, run 3 of 4: paged, about 2 min left",
        "chat, run 4 of 4: none, 60 s left",
    ]
