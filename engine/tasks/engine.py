"""The engine for tasks other than text generation.

It has the batching strategies and the step interface of text generation, but a `Performer` runs the
jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.errors import GenerationError
from core.output import Output
from core.part import Feature, Part
from core.protocol.facts import Facts
from core.protocol.messages import Failed, Performed
from core.request import Request
from core.sampling import Sampled, SamplingParams
from engine.failures import Guard
from engine.stopwatch import Stopwatch
from engine.tasks.performer import Answer, Job, Outcome, Performer
from strategies.base import Strategy

MAX_STEPS = 2**30
"""Steps that a job may take."""
_AGAIN, _DONE = Sampled((0,), (0.0,)), Sampled((1,), (0.0,))
_JOB = SamplingParams(max_tokens=MAX_STEPS, stop_token_ids=_DONE.token_ids, seed=0)


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """The result of a job."""

    request_id: int
    outcome: Outcome
    admitted: float | None
    """When the strategy admitted the job."""

    @property
    def has_failed(self) -> bool:
        return not isinstance(self.outcome, Answer)

    def message(self, id: str) -> Performed | Failed:
        """Return the message to the client, who knows the request by `id`."""
        match self.outcome:
            case Answer() as answer:
                return answer.message(id, is_last=True)
            case error:
                return Failed.of(id, error)


class TaskEngine:
    """Runs the jobs of a task, with the step interface of `engine.engine.Engine`.

    To the strategy, a job is a request with a prompt of one token and an answer of one token for
    each step that it takes. So the strategy handles the waiting queue, batching and aborts.
    """

    def __init__(self, strategy: Strategy, performer: Performer, facts: Facts) -> None:
        self.strategy = strategy
        self._guard = Guard(strategy)
        self.facts = facts
        self.performer = performer
        self.features: tuple[Feature, ...] = performer.description.features
        self.model_time = Stopwatch()
        """Measures the time spent in the performer."""
        self._jobs: dict[int, Job] = {}
        """Waiting and running jobs by request id."""
        self._next_id = 0
        self.num_steps = 0
        """Steps since the start."""
        self.num_step_sequences = 0
        """Jobs in all of these steps."""
        self.num_step_tokens = 0
        """Always 0: jobs have no tokens."""

    def add(self, job: Job, now: float) -> int:
        """Queue a job and return its id. Raises GenerationError if the strategy fails."""
        request = Request(self._next_id, [0], _JOB, arrival=now, parts=job.parts)
        self._guard.add(request)
        self._jobs[request.id] = job
        self._next_id += 1
        return request.id

    def abort(self, request_id: int, index: int | None = None, reason: str = "") -> None:
        """Drop a job: its outcome is never returned. A job that already runs is not interrupted.

        Unknown ids are ignored, and so are `index`, as a job has only one answer, and `reason`.
        """
        self._guard.abort(request_id)
        self._jobs.pop(request_id, None)

    def parts_in_use(self) -> list[Part]:
        """Return the parts of running and waiting jobs."""
        return [part for job in self._jobs.values() for part in job.parts]

    def has_work(self) -> bool:
        return self.strategy.has_work() or self._guard.has_outputs()

    def wake_at(self) -> float | None:
        """Return when to call `advance` if nothing runs; None: at once, or when a job arrives."""
        return self._guard.wake_at()

    def advance(
        self, now: float, between_runs: Callable[[], None] = lambda: None
    ) -> list[TaskOutput]:
        """Perform the jobs that the strategy schedules. `between_runs` may call `add` and `abort`.

        Raises whatever the performer raises, which means that the device has failed.
        """
        plan = self._guard.schedule(now)
        outcomes: dict[int, Outcome] = {}
        finished: list[Output] = []
        if plan is not None:
            self.num_steps += 1
            self.num_step_sequences += len(plan.chunks)
            ids = [chunk.sequence.id for chunk in plan.chunks]
            jobs = [self._jobs[id] for id in ids]
            with self.model_time:
                performed = zip(ids, self.performer.perform(jobs, between_runs), strict=True)
            outcomes = {id: outcome for id, outcome in performed if outcome is not None}
            for id in outcomes:
                self._jobs.pop(id, None)
            results = {id: _DONE if id in outcomes else _AGAIN for id in ids}
            finished = [
                output for output in self._guard.commit(plan, results) if output.finish is not None
            ]
        for output in self._guard.take_outputs():
            self._jobs.pop(output.request_id, None)
            outcomes[output.request_id] = GenerationError(output.failure)
            finished.append(output)
        return [
            TaskOutput(output.request_id, outcomes[output.request_id], output.admitted)
            for output in finished
        ]
