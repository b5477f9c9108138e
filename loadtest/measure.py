"""One run: a warm-up, then a plan sent to a server that is watched meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import gevent
import psutil
from tqdm import tqdm

from loadtest.ask import Ask
from loadtest.drive import drive
from loadtest.endpoint import Endpoint
from loadtest.measures import measures_of, quantiles
from loadtest.plan import Load, Plan, make_plan, warm_up_asks
from loadtest.record import Record
from loadtest.results import Run
from loadtest.session import Session
from loadtest.watch import Watch
from loadtest.words import Words
from loadtest.workloads import Workload

SETTLE_S = 1.0
"""Until the server's last figures have reached /metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured."""

    name: str
    endpoint: Endpoint
    processes: Sequence[psutil.Process] = ()
    """Its own, where it runs here."""
    start_s: float | None = None
    settings: dict[str, str]


def measure(
    subject: Subject,
    workload: Workload,
    load: Load,
    words: Words,
    *,
    num_warm_up: int,
    fixed_answer: int | None = None,
) -> Run:
    """Returns what there is if it is interrupted. Raises ValueError as `make_plan` does."""
    plan = make_plan(workload, load, words, fixed_answer=fixed_answer)
    num_users = plan.num_users(load.users)
    started = time.perf_counter()
    session = _session(subject, workload.name, warm_up_asks(plan, words, num_warm_up))
    is_whole = not num_warm_up or _interruptible(session, min(num_warm_up, num_users))
    warm_up_s = time.perf_counter() - started
    _require_success(session.records)
    samples = []
    if is_whole:
        gevent.sleep(SETTLE_S)  # or the first look would see the warm-up under way
        session = _session(subject, workload.name, plan.asks)
        with _bar(session, subject.name, workload.name, plan):
            watch = Watch(subject.endpoint.url, lambda: session.now_s, subject.processes)
            watch.start()
            is_whole = _interruptible(session, num_users)
        gevent.sleep(SETTLE_S)
        watch.stop()
        samples = watch.samples
    else:
        session.records.clear()
    users = None if plan.is_open else num_users
    variant = "" if fixed_answer is None else f"all answers {plan.asks[0].shape.answer} tokens"
    return Run(
        name=subject.name,
        variant=variant,
        workload=workload.name,
        loop=plan.loop,
        users=users,
        rate=_rate(plan.asks),
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
    """Not one request of the warm-up was answered: nothing can be measured."""


def _session(subject: Subject, name: str, asks: Sequence[Ask]) -> Session:
    endpoint = subject.endpoint
    return Session(asks, endpoint.connect, endpoint.make_schema(), name=name)


def _interruptible(session: Session, num_users: int) -> bool:
    """Whether it ran to its end."""
    try:
        drive(session, num_users)
    except KeyboardInterrupt:
        return False
    return True


def _require_success(records: Sequence[Record]) -> None:
    if records and not any(record.is_good for record in records):
        raise WarmUpError(f"no request of the warm-up was answered: {records[0].error}")


def _bar(session: Session, name: str, workload: str, plan: Plan) -> tqdm:
    """A progress bar that follows the session's records."""
    bar = tqdm(total=len(plan.asks), desc=f"{workload}, {name}", unit="request", leave=True)

    def advance(record: Record) -> None:
        bar.update()
        if not record.is_good:
            bar.set_postfix(errors=sum(not each.is_good for each in session.records))

    session.on_record = advance
    return bar


def _rate(asks: Sequence[Ask]) -> float | None:
    last = asks[-1].due_s
    return len(asks) / last if last else None
