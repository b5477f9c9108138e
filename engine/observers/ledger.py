"""Receipts: what each request has cost, so that all receipts add up to the engine's wall clock.

```
wall clock   | idle | step: shared by its sequences | between steps | step ... | idle |
```

A step's time, from the engine's step before it to its commit, is divided by weight: `ROW` for each
token that a sequence computes, and 1 for each key that one of these tokens attends to. Integer
nanoseconds are divided so that no rest is left. What no request is charged with has a name in
`Ledger.others`. So at the end of each step

    sum of compute_ns of all requests + sum of others = clock - clock at the start

exactly, whatever was preempted, aborted or lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from core.output import Output
from core.part import Feature
from core.plan import Chunk, StepPlan, StepResult
from core.protocol.stats import Receipt, Total
from core.request import Request
from core.sampling import Finish
from engine.executor import FailedAt, Observer
from engine.observers.payer import Payer
from strategies.base import Strategy

ROW = 4096
"""The weight of a computed token, if that of a key is 1."""
MOST_KEYS = 64
"""Priorities of the first waiting request that are told apart."""
Blocked = tuple[str, int | None]
"""Why the first waiting request waits, and its priority."""


@dataclass(slots=True, eq=False)
class Account:
    """An open request."""

    request: Request
    open_answers: set[int]
    receipt: Receipt = field(default_factory=Receipt)
    blocks: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])
    """By sequence that runs: the length of its tables, its blocks, and those it did not fill."""
    since_ns: int = 0
    """Up to when the blocks are in the receipt; for a request that is new, when it arrived."""
    swapped: set[int] = field(default_factory=set[int])
    """Sequences that were swapped out."""
    waited: Counter[Blocked] | None = None
    """While it waits: the ledger's sums when it began to."""

    def hold(self, now_ns: int) -> None:
        """Add what the blocks cost up to now."""
        elapsed = now_ns - self.since_ns
        for _, num_blocks, num_shared in self.blocks.values():
            self.receipt.kv_block_ns += num_blocks * elapsed
            self.receipt.kv_shared_block_ns += num_shared * elapsed
        self.since_ns = now_ns


class Ledger(Observer, Feature):
    """Keeps a receipt for each request, and puts it into the request's last output."""

    def __init__(self, strategy: Strategy, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._strategy = strategy
        self._clock_ns = clock_ns
        self._accounts: dict[int, Account] = {}
        """By request id."""
        self._of_sequence: dict[int, Account] = {}
        self._new: list[Account] = []
        """Requests that have arrived since the last schedule."""
        self._waited: Counter[Blocked] = Counter()
        """For how long the first waiting request has waited for which reason."""
        self._blocked: Blocked | None = None
        """Why it has waited since the last schedule."""
        self._num_preemptions = 0
        self._plan: StepPlan | None = None
        """The plan that the time of this step is charged to."""
        self.began_ns = self._last_ns = self._step_ns = clock_ns()
        self.others: Counter[str] = Counter()
        """Nanoseconds that no request is charged with: idle; between_steps (messages); scheduling
        that planned nothing; moves of blocks alone; ended, for requests that had ended by then."""
        self.closed = Receipt()
        """The sum of the receipts of all requests that have ended."""
        self._by_key: dict[str, Receipt] = {}
        """Of them, those that came with an API key, by its name."""
        self._num_by_key: Counter[str] = Counter()

    def added(self, request: Request) -> None:
        account = Account(request, set(range(request.params.num_answers)))
        account.since_ns = self._clock_ns()
        self._accounts[request.id] = account
        self._of_sequence |= dict.fromkeys(request.sequence_ids, account)
        self._new.append(account)

    def aborted(self, request_id: int, index: int | None, reason: str) -> Receipt | None:
        account = self._accounts.get(request_id)
        if account is None:
            return None
        if index is None:
            self._close(account, self._clock_ns())
        elif len(account.request.sequences) == len(account.request.sequence_ids):
            self._end_answer(account, index, self._clock_ns())
        return None if request_id in self._accounts else account.receipt

    def begins(self, now: float) -> None:
        now_ns = self._clock_ns()
        name = "between_steps" if self._strategy.running else "idle"
        self.others[name] += now_ns - self._last_ns
        if self._blocked is not None:
            self._waited[self._blocked] += now_ns - self._step_ns
        self._last_ns = self._step_ns = now_ns
        self._plan = None

    def scheduled(self, plan: StepPlan | None) -> None:
        self._plan, now_ns = plan, self._step_ns
        if self._strategy.num_preemptions != self._num_preemptions:
            self._num_preemptions = self._strategy.num_preemptions
            self._find_preempted(plan, now_ns)
        for chunk in () if plan is None else plan.chunks:
            account = self._of_sequence.get(chunk.sequence.id)
            if account is not None:
                self._note_blocks(account, chunk, now_ns)
        self._note_waiting(now_ns)

    def failed(self, plan: StepPlan, where: FailedAt) -> None:
        self._charge(plan)
        self._plan = plan

    def computed(self, plan: StepPlan, result: StepResult) -> None:
        self._plan = plan

    def ends(self, outputs: Sequence[Output]) -> Sequence[Output]:
        if self._plan is None:
            now_ns = self._clock_ns()
            self.others["scheduling"] += now_ns - self._last_ns
            self._last_ns = now_ns
        else:
            self._charge(self._plan)
        return [
            output if output.finish is None else self._with_receipt(output) for output in outputs
        ]

    def receipt_of(self, request_id: int) -> Receipt | None:
        """Return the receipt of an open request, which grows until the request has ended."""
        account = self._accounts.get(request_id)
        return None if account is None else account.receipt

    def num_charged_ns(self) -> int:
        """Return the time that all requests together are charged with."""
        open_ns = (account.receipt.compute_ns for account in self._accounts.values())
        return self.closed.compute_ns + sum(open_ns)

    def totals(self) -> tuple[Total, ...]:
        seconds = {"requests": self.num_charged_ns() / 1e9}
        seconds |= {name: count / 1e9 for name, count in self.others.items()}
        queued = {reason: count / 1e9 for reason, count in self.closed.queued_ns.items()}
        return (
            Total(
                "longshore:engine_seconds",
                "The wall clock of the engine, by what the time was spent on.",
                seconds,
                "spent_on",
            ),
            Total(
                "longshore:queued_seconds",
                "Time in the queue of requests that have ended, by reason.",
                queued,
                "reason",
            ),
            Total(
                "longshore:kv_block_seconds",
                "KV blocks held by requests that have ended, each times how long.",
                {"": self.closed.kv_block_ns / 1e9},
            ),
            *self._totals_by_key(),
        )

    def _totals_by_key(self) -> Iterator[Total]:
        """Yield what requests that have ended have cost, if they came with API keys."""
        if not self._by_key:
            return
        figures: dict[str, tuple[str, Callable[[Receipt], float]]] = {
            "compute_seconds": (
                "The engine's time that they are charged with.",
                lambda receipt: receipt.compute_ns / 1e9,
            ),
            "queued_seconds": (
                "Their time in the queue.",
                lambda receipt: sum(receipt.queued_ns.values()) / 1e9,
            ),
            "kv_block_seconds": (
                "KV blocks that they held, each times how long.",
                lambda receipt: receipt.kv_block_ns / 1e9,
            ),
        }
        yield Total(
            "longshore:api_key_requests",
            "Requests that have ended, by API key.",
            {**self._num_by_key},
            "api_key",
        )
        for name, (doc, figure) in figures.items():
            values = {key: figure(receipt) for key, receipt in self._by_key.items()}
            yield Total(f"longshore:api_key_{name}", doc, values, "api_key")

    def _charge(self, plan: StepPlan) -> None:
        """Divide the time since the last reading of the clock among the sequences of a plan."""
        now_ns = self._clock_ns()
        elapsed, self._last_ns = now_ns - self._last_ns, now_ns
        chunks = plan.chunks
        if not chunks:
            self.others["moves"] += elapsed
            return
        sums = list(accumulate(map(_weight, chunks)))
        total, before = sums[-1], 0
        for chunk, upto in zip(chunks, sums, strict=True):
            share = elapsed * upto // total
            account = self._of_sequence.get(chunk.sequence.id)
            if account is None:
                self.others["ended"] += share - before
            else:
                account.receipt.compute_ns += share - before
            before = share

    def _note_blocks(self, account: Account, chunk: Chunk, now_ns: int) -> None:
        """Note that a sequence runs, and how many blocks it holds from now on."""
        id = chunk.sequence.id
        length = sum(len(table.blocks) - table.first for table in chunk.tables)
        known = account.blocks.get(id)
        if known is not None and known[0] == length:
            return
        if account.blocks:
            account.hold(now_ns)
        elif known is None:
            self._admit(account, now_ns)
        num_shared = 0 if known is None else known[2]
        if known is None and id not in account.swapped:
            account.receipt.num_cached_tokens += chunk.start
            groups = zip(self._strategy.memory.layout.groups, chunk.tables, strict=True)
            num_shared = sum(
                max(0, chunk.start // group.block_size - table.first) for group, table in groups
            )
        account.swapped.discard(id)
        num_blocks = len(self._strategy.memory.held(id))
        account.blocks[id] = length, num_blocks, min(num_shared, num_blocks)

    def _admit(self, account: Account, now_ns: int) -> None:
        """Note that a request no longer waits."""
        queued = account.receipt.queued_ns
        if account in self._new:
            self._new.remove(account)
            _add(queued, "step", now_ns - account.since_ns)
        elif account.waited is not None:
            for (reason, priority), total in self._waited.items():
                is_overtaken = priority is not None and priority < account.request.params.priority
                waited_ns = total - account.waited[reason, priority]
                _add(queued, "priority" if is_overtaken else reason, waited_ns)
        account.waited = None
        account.since_ns = now_ns

    def _note_waiting(self, now_ns: int) -> None:
        """Note which requests wait from now on, and why the first of them does."""
        waiting = self._strategy.waiting
        for account in self._new:
            _add(account.receipt.queued_ns, "step", now_ns - account.since_ns)
            account.waited = self._waited.copy()
        self._new.clear()
        if not waiting:
            self._blocked = ("budget", None) if self._accounts else None
            return
        blocked = self._strategy.blocked_by, waiting[0].rank[0]
        is_known = len(self._waited) < MOST_KEYS or blocked in self._waited
        self._blocked = blocked if is_known else (blocked[0], None)

    def _find_preempted(self, plan: StepPlan | None, now_ns: int) -> None:
        running = {id for group in self._strategy.running for id in group.sequence_ids}
        swapped = {sequence.id for sequence in plan.swapped_out} if plan is not None else set[int]()
        for account in self._accounts.values():
            gone = account.blocks.keys() - running
            if gone:
                account.hold(now_ns)
                account.receipt.num_preemptions += 1
                account.swapped |= gone & swapped
                for id in gone:
                    del account.blocks[id]
                if not account.blocks:
                    account.waited = self._waited.copy()

    def _with_receipt(self, output: Output) -> Output:
        account = self._accounts.get(output.request_id)
        if account is None:
            return output
        if output.finish is Finish.ERROR:
            account.open_answers.clear()
        self._end_answer(account, output.index, self._last_ns)
        if account.open_answers:
            return output
        return msgspec.structs.replace(output, receipt=account.receipt)

    def _end_answer(self, account: Account, index: int, now_ns: int) -> None:
        if len(account.request.sequences) == len(account.request.sequence_ids):
            if account.blocks:
                account.hold(now_ns)
            account.blocks.pop(account.request.id + index, None)
        account.open_answers.discard(index)
        if not account.open_answers:
            self._close(account, now_ns)

    def _close(self, account: Account, now_ns: int) -> None:
        if account.blocks:
            account.hold(now_ns)
        elif account in self._new:
            self._new.remove(account)
            _add(account.receipt.queued_ns, "step", now_ns - account.since_ns)
        elif account.waited is not None:
            self._admit(account, now_ns)
        del self._accounts[account.request.id]
        for id in account.request.sequence_ids:
            del self._of_sequence[id]
        self.closed.add(account.receipt)
        payer = Payer.of(account.request.parts)
        if payer is not None:
            self._num_by_key[payer.name] += 1
            self._by_key.setdefault(payer.name, Receipt()).add(account.receipt)
        if not self._accounts:
            self._waited.clear()


def _weight(chunk: Chunk) -> int:
    start, length = chunk.start, chunk.length
    return ROW * length + length * start + length * (length + 1) // 2


def _add(counts: dict[str, int], key: str, count: int) -> None:
    if count:
        counts[key] = counts.get(key, 0) + count


def joined(observers: Iterable[Observer]) -> Observer:
    """Return an observer that shows all of these what it sees."""
    observers = tuple(observers)
    return observers[0] if len(observers) == 1 else Observers(observers)


class Observers(Observer):
    """Shows several observers what it sees."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers

    def added(self, request: Request) -> None:
        for observer in self._observers:
            observer.added(request)

    def aborted(self, request_id: int, index: int | None, reason: str) -> Receipt | None:
        found = [observer.aborted(request_id, index, reason) for observer in self._observers]
        return next(filter(None, found), None)

    def begins(self, now: float) -> None:
        for observer in self._observers:
            observer.begins(now)

    def scheduled(self, plan: StepPlan | None) -> None:
        for observer in self._observers:
            observer.scheduled(plan)

    def computed(self, plan: StepPlan, result: StepResult) -> None:
        for observer in self._observers:
            observer.computed(plan, result)

    def failed(self, plan: StepPlan, where: FailedAt) -> None:
        for observer in self._observers:
            observer.failed(plan, where)

    def ends(self, outputs: Sequence[Output]) -> Sequence[Output]:
        for observer in self._observers:
            outputs = observer.ends(outputs)
        return outputs
