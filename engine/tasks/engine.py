"""The engine of tasks: the same strategies and loop as for tokens, and a performer for executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.messages import Facts
from core.request import Request
from core.sampling import Sampled, SamplingParams
from engine.tasks.performer import Job, Outcome, Performer
from strategies.base import Strategy

_ONE_STEP = SamplingParams(max_tokens=1, seed=0)
_DONE = Sampled((0,), (0.0,))


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """How a job ended."""

    request_id: int
    outcome: Outcome
    admitted: float | None
    """When its turn came."""


class TaskEngine:
    """Used as `engine.engine.Engine` is. To its strategy a job is a prompt and an answer of one
    token each, so what is waiting, who goes together and what was aborted is the strategy's."""

    def __init__(self, strategy: Strategy, performer: Performer, facts: Facts) -> None:
        self.strategy = strategy
        self.facts = facts
        self._performer = performer
        self._jobs: dict[int, Job] = {}
        """Those that wait, by request id."""
        self._next_id = 0
        self.num_steps = 0
        """Since the start, like the sums below."""
        self.num_step_sequences = 0
        self.num_step_tokens = 0

    def add(self, job: Job, now: float) -> int:
        """Accepts a job and returns its id."""
        request = Request(self._next_id, [0], _ONE_STEP, arrival=now)
        self.strategy.add(request)
        self._jobs[request.id] = job
        self._next_id += 1
        return request.id

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Nothing more is heard of it, though one that runs is not stopped. Unknown ids are no
        error; `index` is for answers of which there are several."""
        self.strategy.abort(request_id)
        self._jobs.pop(request_id, None)

    def has_work(self) -> bool:
        return self.strategy.has_work()

    def step(self, now: float, between_runs: Callable[[], None] = lambda: None) -> list[TaskOutput]:
        """Performs the jobs whose turn it is. `between_runs` may call `add` and `abort`.

        Raises what the performer raises: the device has failed.
        """
        plan = self.strategy.schedule(now)
        if plan is None:
            return []
        self.num_steps += 1
        self.num_step_sequences += len(plan.chunks)
        ids = [chunk.sequence.id for chunk in plan.chunks]
        jobs = [self._jobs.pop(id) for id in ids]
        outcomes = dict(zip(ids, self._performer.perform(jobs, between_runs), strict=True))
        ended = self.strategy.commit(plan, dict.fromkeys(ids, _DONE))
        return [
            TaskOutput(each.request_id, outcomes[each.request_id], each.admitted) for each in ended
        ]
