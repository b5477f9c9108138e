"""Why a request waited: the smallest sets of requests without which it would have started.

A set is found by trying. The replay is brought to a step that left the request waiting; in a copy,
some others are dropped, and the strategy itself schedules the step again:

```
request      |- step -|---- blocks held by 17 and 22 ----|--- behind 25 ---| runs
             arrived  the next step                  22 ends           starts
```

A set is kept until what is left of it no longer suffices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.replay.page.rows import Row
from benchmarks.replay.page.tape import Tape
from benchmarks.replay.reproduce import Replay, SavedReplay
from engine.observers.frames import Arrived
from strategies.base import Strategy
from strategies.dynamic import DynamicStrategy
from strategies.group import SequenceGroup

MOST_CAUSES = 12
"""Sets of one request. If there are more, the rest of its time has none."""
MOST_TRIED = 40
"""Requests of a set that are left out one by one, to see whether it could be smaller."""
MOST_NAMED = 4


class Blocker(msgspec.Struct, frozen=True):
    """A request without which another one might have started."""

    id: int
    is_running: bool
    """Otherwise, it waited in front."""
    num_blocks: int
    """KV blocks that it held."""


class Cause(msgspec.Struct, frozen=True):
    """Why a request waited for some time. Seconds of the engine's clock."""

    since: float
    until: float
    reason: str
    """Of the first waiting request: slots, blocks, batch, budget, as in `Strategy.blocked_by`.
    step: the one that ran when the request arrived had to end."""
    blockers: list[Blocker] = []
    """Without all of these, the request would have started at `since`; without fewer, not."""
    option: str = ""
    """The option that had to be other, too."""
    is_smallest: bool = True
    """False: a set of more than MOST_TRIED, which may have some too many."""
    text: str = ""

    @property
    def ids(self) -> list[int]:
        return [blocker.id for blocker in self.blockers]


def causes_of(tape: Tape, request_id: int) -> list[Cause]:
    """Return why a request waited, in order of time. Raises KeyError for an unknown id."""
    row = tape.rows[request_id]
    arrived = next(
        i
        for i, frame in enumerate(tape.recording.frames)
        if isinstance(frame, Arrived) and frame.id == row.request
    )
    step_times = tape.step_times
    causes: list[Cause] = []
    for since, until in _waits(tape, row):
        is_new = since == row.arrived
        # The step that preempts a request is the first that might have run it.
        first = bisect_right(tape.steps, arrived) if is_new else bisect_left(step_times, since)
        last = bisect_left(step_times, until)
        begins = step_times[first] if first < len(step_times) else until
        begins = min(begins, until)
        if is_new and begins > since:
            causes.append(_with_text(Cause(since, begins, "step")))
        numbers = range(first, last)
        causes += _Search(tape, row.request, until).causes(numbers, step_times)
    return causes


def _waits(tape: Tape, row: Row) -> list[tuple[float, float]]:
    """Return when the first sequence of a request waited."""
    end = tape.end if row.end is None else row.end
    waits = [(row.arrived, end if row.admitted is None else row.admitted)]
    for each in row.breaks:
        if each.phase != "prefill":
            waits.append((each.since, end if each.until is None else each.until))
    return waits


class _Search:
    """Looks for the causes of one wait."""

    def __init__(self, tape: Tape, request_id: int, until: float) -> None:
        self._tape = tape
        self._id = request_id
        self._until = until

    def causes(self, numbers: range, step_times: Sequence[float]) -> list[Cause]:
        """Return the causes for which these steps left the request waiting."""
        if not numbers:
            return []
        replay = self._tape.to(self._tape.steps[numbers[0]])
        found: list[Cause] = []
        left: set[int] = set()
        for number in numbers:
            replay.run_to(self._tape.steps[number])
            now, here = step_times[number], _request_ids(replay.engine.strategy)
            if found and self._still_suffices(replay, now, found[-1], left, here):
                left &= here
                continue
            if found:
                found[-1] = msgspec.structs.replace(found[-1], until=now)
            if len(found) == MOST_CAUSES:
                reason = _schedule(replay.save(), now).blocked_by
                found.append(Cause(now, self._until, reason))
                break
            found.append(self._cause(replay, now))
            left = set(found[-1].ids)
        return [_with_text(cause) for cause in found]

    def _still_suffices(
        self, replay: Replay, now: float, cause: Cause, left: set[int], here: set[int]
    ) -> bool:
        if not cause.blockers or left <= here:
            return True
        return self._starts(replay.save(), now, left & here, cause.option)

    def _cause(self, replay: Replay, now: float) -> Cause:
        strategy, saved = replay.engine.strategy, replay.save()
        is_waiting = any(group.request.id == self._id for group in strategy.waiting)
        reason = _schedule(saved, now).blocked_by if is_waiting else "blocks"  # it is preempted now
        ahead = self._ahead(strategy)
        running = _by_request(strategy.running, self._id)
        weight = _WEIGHTS[reason]
        running.sort(key=lambda groups: -sum(weight(strategy, group) for group in groups))
        orders = [running + ahead, ahead + running] if ahead else [running]
        for option in ("", *_options(strategy)):
            sets = [self._smallest(saved, now, order, option) for order in orders]
            suffices = [one for one in sets if one is not None]
            if suffices:
                blockers = [_blocker(strategy, groups) for groups in min(suffices, key=len)]
                is_smallest = len(blockers) <= MOST_TRIED
                return Cause(now, self._until, reason, blockers, option, is_smallest)
        return Cause(now, self._until, reason)

    def _smallest(
        self, saved: SavedReplay, now: float, order: list[list[SequenceGroup]], option: str
    ) -> list[list[SequenceGroup]] | None:
        """Return the fewest of the first requests that suffice, without those that need not be in.

        None if not even all of them suffice.
        """

        def suffices(some: list[list[SequenceGroup]]) -> bool:
            return self._starts(saved, now, {groups[0].request.id for groups in some}, option)

        if not suffices(order):
            return None
        count = bisect_left(range(len(order)), True, key=lambda num: suffices(order[:num]))
        found = order[:count]
        for groups in found[::-1] if count <= MOST_TRIED else ():
            fewer = [one for one in found if one is not groups]
            if suffices(fewer):
                found = fewer
        return found

    def _starts(self, saved: SavedReplay, now: float, without: set[int], option: str) -> bool:
        """Whether the request would start now, without some others."""
        strategy = _schedule(saved, now, without, option)
        return any(group.request.id == self._id for group in strategy.running)

    def _ahead(self, strategy: Strategy) -> list[list[SequenceGroup]]:
        """Return the waiting requests in front of this one."""
        ids = [group.request.id for group in strategy.waiting]
        end = ids.index(self._id) if self._id in ids else 0
        return _by_request(strategy.waiting[:end], self._id)


def _schedule(
    saved: SavedReplay, now: float, without: set[int] | None = None, option: str = ""
) -> Strategy:
    """Return the strategy after the next step, if some requests had gone before it."""
    strategy = saved.load().engine.strategy
    if option and isinstance(strategy, DynamicStrategy):
        strategy.max_delay_s = 0.0
    for id in sorted(without or ()):
        strategy.abort(id)
    strategy.schedule(now)
    return strategy


def _options(strategy: Strategy) -> tuple[str, ...]:
    return ("max_batch_delay",) if isinstance(strategy, DynamicStrategy) else ()


def _by_request(groups: Sequence[SequenceGroup], but: int) -> list[list[SequenceGroup]]:
    """Return the groups of each request, except those of request `but`."""
    found: dict[int, list[SequenceGroup]] = {}
    for group in groups:
        if group.request.id != but:
            found.setdefault(group.request.id, []).append(group)
    return list(found.values())


def _request_ids(strategy: Strategy) -> set[int]:
    return {group.request.id for group in (*strategy.running, *strategy.waiting)}


def _num_blocks(strategy: Strategy, group: SequenceGroup) -> int:
    return len({block for id in group.sequence_ids for block in strategy.memory.held(id)})


def _blocker(strategy: Strategy, groups: list[SequenceGroup]) -> Blocker:
    is_running = any(group in strategy.running for group in groups)
    num_blocks = sum(_num_blocks(strategy, group) for group in groups)
    return Blocker(groups[0].request.id, is_running, num_blocks)


_WEIGHTS: dict[str, Callable[[Strategy, SequenceGroup], int]] = {
    "blocks": _num_blocks,
    "slots": lambda strategy, group: group.num_sequences,
    "batch": lambda strategy, group: group.num_sequences,
    "budget": lambda strategy, group: sum(one.num_pending_tokens for one in group.sequences),
}
"""By reason: how much of what is missing a running group has."""


def _with_text(cause: Cause) -> Cause:
    """Return the cause with a sentence, such as "380 ms for 23 blocks held by #17 and #22"."""
    running = [one for one in cause.blockers if one.is_running]
    ahead = [one for one in cause.blockers if not one.is_running]
    text = f"{_duration(cause.until - cause.since)} {_need(cause, running)}"
    if ahead:
        text += f", behind {_names(ahead)} in the queue"
    if cause.option:
        text += f" (option.{cause.option})"
    return msgspec.structs.replace(cause, text=text)


def _need(cause: Cause, running: list[Blocker]) -> str:
    names = _names(running)
    match cause.reason:
        case "step":
            return "until the step that ran had ended"
        case "blocks":
            count = sum(one.num_blocks for one in running)
            return f"for {count} blocks held by {names}" if running else "while blocks were missing"
        case "slots":
            return f"for the place of {names}" if running else "for a place in the batch"
        case "budget":
            return "for the tokens of a step" + (f", used for {names}" if running else "")
        case _:
            return "for the batch to fill"


def _names(blockers: list[Blocker]) -> str:
    names = [f"#{one.id}" for one in blockers[:MOST_NAMED]]
    if len(blockers) > MOST_NAMED:
        names.append(f"{len(blockers) - MOST_NAMED} others")
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _duration(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
