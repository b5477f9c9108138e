"""Runs the same requests against several servers, in rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from loadtest.load.request import Words
from loadtest.load.request_plan import Load, most_sequences
from loadtest.load.workloads import Workload
from loadtest.study.measures import MAX_OTHER_CORES
from loadtest.study.results import Run
from loadtest.study.tuning import TUNED, Setting, Trial, best_setting, describe

if TYPE_CHECKING:  # these import locust, which monkey-patches the process
    from loadtest.study.measure import Subject
    from loadtest.study.subjects import Subjects

MAX_ATTEMPTS = 3
"""Attempts at a run that other processes disturb. While the machine stays busy, there is one."""
TRIAL = 0
"""Round number of trial runs, which only choose a setting."""


class Turn(NamedTuple):
    """One run to measure."""

    workload: Workload
    round: int
    """From 1; TRIAL for a trial."""
    name: str
    """The subject's name."""
    fixed_output: int | None
    """As in `loadtest.load.request_plan.make_plan`."""
    setting: Setting | None = None
    """The setting of dynamic batching; None: as in the given properties."""


def turns(
    workload: Workload, names: Sequence[str], rounds: int, tuned: Setting | None = None
) -> Iterator[Turn]:
    """Yield all runs of a workload. Each round begins with another subject, to be fair to all.

    Dynamic batching runs again with the setting `tuned`, if there is one. If the workload has a
    `fixed_dynamic_output`, it also runs again with all answers of this length, as in AWS's article.
    """
    for number in range(1, rounds + 1):
        start = (number - 1) % len(names)
        for name in [*names[start:], *names[:start]]:
            yield Turn(workload, number, name, None)
            if name == "dynamic" and workload.fixed_dynamic_output:
                yield Turn(workload, number, name, workload.fixed_dynamic_output)
            if name == "dynamic" and tuned is not None:
                yield Turn(workload, number, TUNED, None, tuned)


def announced(
    planned: Sequence[Turn],
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Turn]:
    """Yield the turns. Before each, say which one it is and about how long the rest takes."""
    begin = clock()
    for done, turn in enumerate(planned):
        left = ""
        if done:
            seconds_per_run = (clock() - begin) / done
            left = f", {_duration(seconds_per_run * (len(planned) - done))} left"
        say(f"{turn.workload.name}, run {done + 1} of {len(planned)}: {turn.name}{left}")
        yield turn


def _duration(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


class Comparison:
    """Measures turns. As a context manager, it stops the servers that it keeps between runs.

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
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """measure: `loadtest.study.measure.measure`. say: prints a line."""
        self._subjects = subjects
        self._load = load
        self._words: Words | None = None
        self._num_warm_up = num_warm_up
        self._measure = measure
        self._say = say
        self._max_attempts = max_attempts
        self._servers = ExitStack()
        self._tuned = self._servers.enter_context(ExitStack())
        """The part of `_servers` that holds the server of `TUNED`."""
        self._kept: dict[tuple[str, Setting | None], Subject] = {}
        self._stays_busy = False

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *error: object) -> None:
        self._servers.close()

    def tune(self, workload: Workload, on_trial: Callable[[Trial], None]) -> Setting | None:
        """Return the setting with which dynamic batching serves the workload best.

        None means the setting in the given properties. on_trial: called after each trial. Raises
        KeyboardInterrupt if it was interrupted.
        """

        self._say(f"{workload.name}: looking for the best setting of dynamic batching")
        self._tuned.close()  # the server with the previous workload's setting
        self._kept = {key: subject for key, subject in self._kept.items() if key[1] is None}
        given = self._subjects.given_setting

        def rate_of(setting: Setting) -> float:
            turn = Turn(workload, TRIAL, TUNED, None, setting)
            if setting == given:
                turn = Turn(workload, TRIAL, "dynamic", None)
            run = self.run(turn)
            if not run.is_whole:
                raise KeyboardInterrupt
            rate = run.measures.requests_per_s
            self._say(f"{workload.name}, {describe(run.settings)}: {rate:.3g} requests/s")
            on_trial(
                Trial(
                    workload=workload.name,
                    settings=run.settings,
                    is_given=setting == given,
                    requests_per_s=rate,
                )
            )
            return rate

        best = best_setting(rate_of, given, most_sequences(workload, self._load))
        return None if best == given else best

    def rounds(self, workload: Workload, num_rounds: int, tuned: Setting | None) -> Iterator[Run]:
        """Measure a workload in rounds, and yield each run.

        Stops after an interrupted run. Also stops once other processes have disturbed every server,
        because then no further round could name a winner.
        """
        disturbed: dict[str, bool] = {}
        last_round = 1
        for turn in announced(
            list(turns(workload, self._subjects.names, num_rounds, tuned)), self._say
        ):
            if turn.round > last_round and len(disturbed) > 1 and all(disturbed.values()):
                return
            last_round = turn.round
            run = self.run(turn)
            yield run
            if not run.is_whole:
                return
            is_disturbed = _other_cores(run) > MAX_OTHER_CORES
            disturbed[run.name] = disturbed.get(run.name, False) or is_disturbed

    def run(self, turn: Turn) -> Run:
        """Measure a turn, and measure it again if the machine was busy with other things.

        If all attempts are disturbed, each of the following turns has one attempt, until one is
        undisturbed. Returns the least disturbed attempt, or one that was interrupted.
        """
        attempts: list[Run] = []
        max_attempts = 1 if self._stays_busy else self._max_attempts
        with self._opened(turn) as subject:
            while len(attempts) < max_attempts:
                run = self._attempt(turn, subject, len(attempts))
                if not run.is_whole:
                    return run
                attempts.append(run)
                others = _other_cores(run)
                self._stays_busy = others > MAX_OTHER_CORES
                if not self._stays_busy:
                    break
                if len(attempts) < max_attempts:
                    self._say(
                        f"other processes used {others:.1f} cores; measuring {run.name} again"
                    )
        quietest = min(attempts, key=_other_cores)
        quietest.num_discarded = len(attempts) - 1
        return quietest

    def _attempt(self, turn: Turn, subject: Subject, number: int) -> Run:
        if self._words is None:
            self._words = subject.endpoint.words()
            self._load = with_limit(self._load, subject.endpoint.max_length())
        run = self._measure(
            subject,
            turn.workload,
            self._load_of(turn, number),
            self._words,
            num_warm_up=self._num_warm_up,
            fixed_output=turn.fixed_output,
        )
        run.round = turn.round
        return run

    def _load_of(self, turn: Turn, attempt: int) -> Load:
        load = dataclasses.replace(self._load, words_of=f", round {turn.round}, attempt {attempt}")
        return for_trial(load) if turn.round == TRIAL else load

    def _opened(self, turn: Turn) -> AbstractContextManager[Subject]:
        is_trial = turn.round == TRIAL and turn.setting is not None
        if is_trial or not self._subjects.keeps_servers:
            return self._subjects.open(turn.name, turn.setting)
        key = turn.name, turn.setting
        if key not in self._kept:
            servers = self._servers if turn.setting is None else self._tuned
            self._kept[key] = servers.enter_context(self._subjects.open(*key))
        return nullcontext(self._kept[key])


def for_trial(load: Load) -> Load:
    """Return the load with half the seconds or, if it has no time limit, half the requests.

    Keeps at least two requests per user, if the load has that many.
    """
    if load.seconds is not None:
        return dataclasses.replace(load, seconds=load.seconds / 2)
    enough = min(load.num_requests, 2 * load.users)
    return dataclasses.replace(load, num_requests=max(load.num_requests // 2, enough))


def with_limit(load: Load, max_length: int | None) -> Load:
    """Return the load with the server's length limit if it has none of its own."""
    return load if load.max_length else dataclasses.replace(load, max_length=max_length)


def _other_cores(run: Run) -> float:
    return run.measures.other_cpu or 0.0
