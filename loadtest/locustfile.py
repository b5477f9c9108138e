"""By hand, with locust's web page: `locust -f loadtest/locustfile.py --host http://localhost:8080`.

Users, rate of spawning and run time are locust's own settings; what they send is chosen here.
Requests never end: the workload begins again. The loop is closed, so workloads with arrivals of
their own are sent as fast as users get answers.
"""

from __future__ import annotations

import dataclasses
import itertools
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from locust import events

from loadtest.ask import Ask
from loadtest.endpoint import Endpoint
from loadtest.plan import Load, make_plan
from loadtest.session import Session
from loadtest.user import LoadUser
from loadtest.workloads import WORKLOADS

NUM_DISTINCT = 1000
"""Requests before the first one comes again."""


class HandUser(LoadUser):
    """What locust finds in this file."""


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Longshore's load test")
    group.add_argument("--workload", choices=list(WORKLOADS), default="aws", help="what is sent")
    group.add_argument("--schema", choices=["lmi", "openai"], default="lmi", help="its form")
    group.add_argument("--length-scale", type=float, default=1.0, help="factor on all lengths")
    group.add_argument("--seed", type=int, default=0, help="of lengths and texts")


@events.test_start.add_listener
def _begin(environment: Any, **_: object) -> None:
    options = environment.parsed_options
    endpoint = Endpoint(url=environment.host or "http://localhost:8080", schema=options.schema)
    load = Load(
        requests=NUM_DISTINCT,
        users=1,
        length_scale=options.length_scale,
        max_length=endpoint.max_length(),
        seed=options.seed,
    )
    plan = make_plan(WORKLOADS[options.workload], load, endpoint.words())
    environment.session = Session(
        _again_and_again(plan.asks), endpoint.connect, endpoint.make_schema(), name=options.workload
    )
    # Nothing reads them here, and a run by hand may be long.
    environment.session.on_record = lambda record: environment.session.forget()


def _again_and_again(asks: tuple[Ask, ...]) -> Iterator[Ask]:
    for ask in itertools.cycle(asks):
        yield dataclasses.replace(ask, due_s=None)
