"""Runs one workload against one server: a warm-up, then the plan while the server is sampled."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import gevent
import psutil
from tqdm import tqdm

from loadtest.load.plan import Load, Plan, make_plan, warm_up_requests
from loadtest.load.record import Record
from loadtest.load.request import Request, Words
from loadtest.load.session import Session
from loadtest.load.user import LoadUser, SessionEnvironment
from loadtest.load.workloads import Workload
from loadtest.servers.endpoint import Endpoint
from loadtest.servers.watch import Watch
from loadtest.study.measures import measures_of, quantiles
from loadtest.study.results import Run

SETTLE_S = 0.6
"""Pause before reading /metrics, so that it includes the server's last figures, which the engine
sends every quarter of a second."""
USER_GRACE_S = 5.0
"""Time for locust's users to stop once the session has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A server under test."""

    name: str
    endpoint: Endpoint
    processes: Sequence[psutil.Process] = ()
    """The server's processes, if it runs on this machine."""
    start_s: float | None = None
    settings: dict[str, str]


def measure(
    subject: Subject,
    workload: Workload,
    load: Load,
    words: Words,
    *,
    num_warm_up: int,
    fixed_output: int | None = None,
) -> Run:
    """Warm up the server, run the workload, and return its measures.

    If interrupted, returns the measures so far. Raises ValueError as `make_plan` does, and
    WarmUpError if every warm-up request failed.
    """
    plan = make_plan(workload, load, words, fixed_output=fixed_output)
    num_users = plan.num_users(load.users)
    started = time.perf_counter()
    session = _session(subject, workload.name, warm_up_requests(plan, words, num_warm_up))
    is_whole = not num_warm_up or _completes(session, min(num_warm_up, num_users))
    warm_up_s = time.perf_counter() - started
    _require_success(session.records)
    samples = []
    if is_whole:
        gevent.sleep(SETTLE_S)  # otherwise the first sample would still count the warm-up
        session = _session(subject, workload.name, plan.requests, plan.stop_s)
        with _bar(session, subject.name, workload.name, plan):
            watch = Watch(subject.endpoint.url, lambda: session.now_s, subject.processes)
            watch.start()
            is_whole = _completes(session, num_users)
        gevent.sleep(SETTLE_S)
        watch.stop()
        samples = watch.samples
    else:
        session.records.clear()
    users = None if plan.is_open else num_users
    variant = (
        "" if fixed_output is None else f"all outputs {plan.requests[0].shape.output_tokens} tokens"
    )
    return Run(
        name=subject.name,
        variant=variant,
        workload=workload.name,
        loop=plan.loop,
        users=users,
        rate=_rate(plan.requests),
        length_scale=load.length_scale,
        num_left_out=plan.num_left_out,
        tokens_per_word=words.tokens_per_word,
        start_s=subject.start_s,
        warm_up_s=warm_up_s,
        settings=subject.settings,
        is_whole=is_whole,
        measures=measures_of(session.records, session.gaps_s, samples, clients=users),
        gap_quantiles_s=quantiles(session.gaps_s),
        records=sorted(session.records, key=lambda record: record.index),
        samples=samples,
    )


class WarmUpError(Exception):
    """Every warm-up request failed, so nothing can be measured."""


def _session(
    subject: Subject, name: str, requests: Sequence[Request], stop_s: float | None = None
) -> Session:
    endpoint = subject.endpoint
    schema = endpoint.make_schema()
    return Session(requests, endpoint.connect, schema, name=name, stop_s=stop_s)


def _completes(session: Session, num_users: int) -> bool:
    """Run a session. Returns False if it was interrupted."""
    try:
        _drive(session, num_users)
    except KeyboardInterrupt:
        return False
    return True


def _drive(session: Session, num_users: int) -> None:
    """Run a session with locust's runner, and stop the users at the end or when interrupted."""
    for name in ("locust", "locust.runners"):
        logging.getLogger(name).setLevel(logging.ERROR)  # warns of many users at once
    environment = SessionEnvironment(user_classes=[LoadUser], stop_timeout=0)
    environment.session = session
    runner = environment.create_local_runner()
    try:
        runner.start(num_users, spawn_rate=num_users)
        session.finished.wait()
    finally:
        runner.quit()
        runner.greenlet.join(USER_GRACE_S)


def _require_success(records: Sequence[Record]) -> None:
    if records and not any(record.is_good for record in records):
        raise WarmUpError(f"every warm-up request failed, the first with: {records[0].error}")


def _bar(session: Session, name: str, workload: str, plan: Plan) -> tqdm:
    """Return a progress bar that advances with the session's records."""
    total = len(plan.requests) if plan.stop_s is None else None
    title = f"{workload}, {name}"
    bar = tqdm(total=total, desc=title, unit="request", leave=True, disable=None)  # only on a tty

    def advance(record: Record) -> None:
        bar.update()
        if not record.is_good:
            bar.set_postfix(errors=sum(not record.is_good for record in session.records))

    session.on_record = advance
    return bar


def _rate(requests: Sequence[Request]) -> float | None:
    last = requests[-1].due_s
    return len(requests) / last if last else None
