"""The same work against each of several servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from loadtest.measure import measure
from loadtest.plan import Load
from loadtest.results import Run
from loadtest.subjects import Subjects
from loadtest.words import Words
from loadtest.workloads import Workload


def compare(
    subjects: Subjects,
    workloads: Sequence[Workload],
    load: Load,
    *,
    num_warm_up: int,
    on_run: Callable[[Run], None],
) -> bool:
    """Every workload on every subject, each time a fresh one; False if it was interrupted.

    How words become tokens, and how long a request may be, is asked of the first of them, and
    holds for all: otherwise their work would differ.
    """
    words: Words | None = None
    for workload in workloads:
        for name in subjects.names:
            for answer in _answers(workload, name):
                with subjects.open(name) as subject:
                    if words is None:
                        words = subject.endpoint.words()
                        load = with_limit(load, subject.endpoint.max_length())
                    run = measure(
                        subject,
                        workload,
                        load,
                        words,
                        num_warm_up=num_warm_up,
                        fixed_answer=answer,
                    )
                on_run(run)
                if not run.is_whole:
                    return False
    return True


def with_limit(load: Load, max_length: int | None) -> Load:
    """With the server's limit, where none was given."""
    return load if load.max_length else dataclasses.replace(load, max_length=max_length)


def _answers(workload: Workload, name: str) -> Sequence[int | None]:
    """Their own lengths; for dynamic batching then also what the article measured it with."""
    fixed = workload.fixed_dynamic_answer
    return (None, fixed) if name == "dynamic" and fixed else (None,)
