"""Runs the same requests against several servers, in rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from loadtest.measures import MAX_OTHER_CORES
from loadtest.plan import Load
from loadtest.request import Words
from loadtest.results import Run
from loadtest.workloads import Workload

if TYPE_CHECKING:  # these import locust, which monkey-patches the process
    from loadtest.measure import Subject
    from loadtest.subjects import Subjects

MAX_ATTEMPTS = 3


class Turn(NamedTuple):
    """One run to measure."""

    workload: Workload
    round: int
    """From 1."""
    name: str
    """The subject's."""
    fixed_output: int | None
    """As in `loadtest.plan.make_plan`."""


def turns(workloads: Sequence[Workload], names: Sequence[str], rounds: int) -> Iterator[Turn]:
    """Yield all runs of a comparison. Each round begins with another subject.

    So no subject always runs first or last. Dynamic batching also runs with answers of one length,
    as in AWS's article.
    """
    for workload in workloads:
        for number in range(1, rounds + 1):
            start = (number - 1) % len(names)
            for name in [*names[start:], *names[:start]]:
                yield Turn(workload, number, name, None)
                if name == "dynamic" and workload.fixed_dynamic_output:
                    yield Turn(workload, number, name, workload.fixed_dynamic_output)


class Comparison:
    """Measures turns. Use it as a context manager, which stops the servers that stay up.

    The first subject's tokenizer and length limit apply to all subjects; otherwise their requests
    would differ.
    """

    def __init__(
        self,
        subjects: Subjects,
        load: Load,
        *,
        num_warm_up: int,
        measure: Callable[..., Run],
        say: Callable[[str], None],
    ) -> None:
        """measure: `loadtest.measure.measure`. say: prints a line."""
        self._subjects = subjects
        self._load = load
        self._words: Words | None = None
        self._num_warm_up = num_warm_up
        self._measure = measure
        self._say = say
        self._servers = ExitStack()
        self._kept: dict[str, Subject] = {}

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *error: object) -> None:
        self._servers.close()

    def run(self, turn: Turn) -> Run:
        """Measure a turn, again if the machine is busy with other things.

        Returns the attempt that other processes disturbed least, or one that was interrupted.
        """
        attempts: list[Run] = []
        while len(attempts) < MAX_ATTEMPTS:
            run = self._attempt(turn, len(attempts))
            if not run.is_whole:
                return run
            attempts.append(run)
            others = _other_cores(run)
            if others <= MAX_OTHER_CORES:
                break
            if len(attempts) < MAX_ATTEMPTS:
                self._say(f"other processes used {others:.1f} cores; measuring {run.name} again")
        quietest = min(attempts, key=_other_cores)
        quietest.num_discarded = len(attempts) - 1
        return quietest

    def _attempt(self, turn: Turn, number: int) -> Run:
        with self._opened(turn.name) as subject:
            if self._words is None:
                self._words = subject.endpoint.words()
                self._load = with_limit(self._load, subject.endpoint.max_length())
            run = self._measure(
                subject,
                turn.workload,
                dataclasses.replace(self._load, words_of=f", round {turn.round}, attempt {number}"),
                self._words,
                num_warm_up=self._num_warm_up,
                fixed_output=turn.fixed_output,
            )
        run.round = turn.round
        return run

    def _opened(self, name: str) -> AbstractContextManager[Subject]:
        if not self._subjects.keeps_servers:
            return self._subjects.open(name)
        if name not in self._kept:
            self._kept[name] = self._servers.enter_context(self._subjects.open(name))
        return nullcontext(self._kept[name])


def with_limit(load: Load, max_length: int | None) -> Load:
    """Return the load with the server's length limit if it has none of its own."""
    return load if load.max_length else dataclasses.replace(load, max_length=max_length)


def _other_cores(run: Run) -> float:
    return run.measures.other_cpu or 0.0
