"""Runs the same requests against several servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from loadtest.measure import measure
from loadtest.plan import Load
from loadtest.request import Words
from loadtest.results import Run
from loadtest.subjects import Subjects
from loadtest.workloads import Workload


def compare(
    subjects: Subjects,
    workloads: Sequence[Workload],
    load: Load,
    *,
    num_warm_up: int,
    on_run: Callable[[Run], None],
) -> bool:
    """Run every workload on every subject, opened afresh each time.

    Returns False if interrupted. The first subject's tokenizer and length limit apply to all
    subjects; otherwise their requests would differ.
    """
    words: Words | None = None
    for workload in workloads:
        for name in subjects.names:
            for output in _fixed_outputs(workload, name):
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
                        fixed_output=output,
                    )
                on_run(run)
                if not run.is_whole:
                    return False
    return True


def with_limit(load: Load, max_length: int | None) -> Load:
    """Return the load with the server's length limit if it has none of its own."""
    return load if load.max_length else dataclasses.replace(load, max_length=max_length)


def _fixed_outputs(workload: Workload, name: str) -> Sequence[int | None]:
    """Return the values of `fixed_output` to run: dynamic batching also runs the article's."""
    fixed = workload.fixed_dynamic_output
    return (None, fixed) if name == "dynamic" and fixed else (None,)
