"""For manual load tests in locust's web UI.

Run `locust -f loadtest/locustfile.py --host http://localhost:8080`. The number of users, spawn rate
and run time are locust's own settings; the options added here choose what the users send. The
workload repeats until the run is stopped. The loop is closed: a workload with arrival times is sent
as fast as users get their responses.
"""

from __future__ import annotations

import dataclasses
import itertools
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from locust import events

from loadtest.load.request import PlannedRequest
from loadtest.load.request_plan import Load, make_plan
from loadtest.load.session import Session
from loadtest.load.user import LoadUser
from loadtest.load.workloads import WORKLOADS
from loadtest.servers.endpoint import Endpoint

NUM_DISTINCT = 1000
"""Requests before the workload repeats."""


class HandUser(LoadUser):
    """The user class of this locustfile; locust only runs classes defined in it."""


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Longshore's load test")
    group.add_argument("--workload", choices=list(WORKLOADS), default="aws", help="workload to run")
    group.add_argument("--schema", choices=["lmi", "openai"], default="lmi", help="request schema")
    group.add_argument("--length-scale", type=float, default=1.0, help="factor for all lengths")
    group.add_argument("--seed", type=int, default=0, help="seed for lengths and prompts")


@events.test_start.add_listener
def _begin(environment: Any, **_: object) -> None:
    options = environment.parsed_options
    endpoint = Endpoint(url=environment.host or "http://localhost:8080", schema=options.schema)
    load = Load(
        num_requests=NUM_DISTINCT,
        users=1,
        length_scale=options.length_scale,
        max_length=endpoint.max_length(),
        seed=options.seed,
    )
    plan = make_plan(WORKLOADS[options.workload], load, endpoint.words())
    name = f"{options.workload} on {endpoint.strategy() or environment.host}"
    environment.session = Session(
        _repeated(plan.requests),
        endpoint.connect,
        endpoint.make_schema(),
        name=name,
    )
    # A manual run may be long.
    environment.session.on_record = lambda record: environment.session.forget()


def _repeated(requests: tuple[PlannedRequest, ...]) -> Iterator[PlannedRequest]:
    for request in itertools.cycle(requests):
        yield dataclasses.replace(request, due_s=None)
