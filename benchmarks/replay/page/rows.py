"""When each sequence of a replay arrived, ran, waited and ended, for the page's bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from core.output import Output
from core.plan import Chunk, StepPlan
from core.protocol.stats import Receipt
from core.request import Request
from core.sampling import Finish
from engine.executor import Observer
from engine.observers.ledger import Ledger
from strategies.base import Strategy

ABORTED = "aborted"


class Break(msgspec.Struct):
    """A time in which a sequence that has run before did not decode."""

    phase: Literal["preempted", "swapped", "prefill"]
    since: float = msgspec.field(name="from")
    until: float | None = msgspec.field(name="to", default=None)


class Row(msgspec.Struct):
    """A sequence, with the names that the page's pictures know (container/ui/static/history.js).

    Times are seconds of the engine's monotonic clock.
    """

    id: int
    request: int
    num_prompt_tokens: int
    priority: int
    arrived: float
    admitted: float | None = None
    first: float | None = None
    """When it got its first token."""
    end: float | None = None
    generated: int = 0
    breaks: list[Break] = []
    ended_by: str = ""
    """A finish reason, or why it was aborted."""

    def until(self, now: float, generated: int) -> Row:
        """Return a copy as of a moment between two steps at which the sequence had not ended.

        What happens when a step begins is later than one that ends now.
        """
        breaks = [
            Break(each.phase, each.since, _until(each, now))
            for each in self.breaks
            if each.since < now
        ]
        return msgspec.structs.replace(
            self,
            admitted=None if self.admitted is None or self.admitted >= now else self.admitted,
            first=None if self.first is None or self.first > now else self.first,
            end=None,
            generated=generated,
            breaks=breaks,
            ended_by="",
        )


def _until(each: Break, now: float) -> float | None:
    is_over = each.until is not None and (
        each.until <= now if each.phase == "prefill" else each.until < now
    )
    return each.until if is_over else None


class Rows(Observer):
    """Collects the rows of all sequences, and the receipts of all requests."""

    def __init__(
        self, strategy: Strategy, clock_ns: Callable[[], int], ledger: Ledger | None = None
    ) -> None:
        """clock_ns: at the begin of a step when it is scheduled, and at its end when it ends.

        ledger: it observes the same engine, and sees everything first.
        """
        self._strategy = strategy
        self._clock_ns = clock_ns
        self._ledger = ledger
        self.rows: dict[int, Row] = {}
        """By sequence id."""
        self.receipts: dict[int, Receipt] = {}
        """By request id. They grow until the request has ended."""
        self._open: dict[int, Row] = {}
        self._requests: dict[int, Request] = {}
        """By sequence id: requests whose sequences may run."""
        self._recomputed: list[Row] = []
        """Rows that the step brings up to their newest token again."""
        self._num_preemptions = 0

    def resume(self, rows: Iterable[tuple[Request, Row]]) -> None:
        """Go on with unfinished sequences. Those that ran, and no longer do, are preempted now."""
        for request, row in rows:
            self.rows[row.id] = self._open[row.id] = row
            self._requests |= dict.fromkeys(request.sequence_ids, request)
        self._find_preempted(self._now())

    def added(self, request: Request) -> None:
        self._requests |= dict.fromkeys(request.sequence_ids, request)
        for sequence in request.sequences:
            self._row(sequence.id)
        if self._ledger is not None:
            receipt = self._ledger.receipt_of(request.id)
            assert receipt is not None
            self.receipts[request.id] = receipt

    def aborted(self, request_id: int, index: int | None, reason: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            ids = request.sequence_ids if index is None else (request_id + index,)
            for id in ids:
                self._end(id, reason or ABORTED)

    def scheduled(self, plan: StepPlan | None) -> None:
        now = self._now()
        if self._strategy.num_preemptions != self._num_preemptions:
            self._num_preemptions = self._strategy.num_preemptions
            self._find_preempted(now)
        for chunk in () if plan is None else plan.chunks:
            self._run(chunk, now)

    def ends(self, outputs: Sequence[Output]) -> Sequence[Output]:
        now = self._now()
        for row in self._recomputed:
            row.breaks[-1].until = now
        self._recomputed.clear()
        for output in outputs:
            row = self.rows.get(output.request_id + output.index)
            if row is not None and output.token_ids and output.finish is not Finish.ERROR:
                row.first = now if row.first is None else row.first
                row.generated += len(output.token_ids)
            if output.finish is not None:
                self._end_answer(output, output.finish)
        return outputs

    def _now(self) -> float:
        return self._clock_ns() / 1e9

    def _row(self, id: int) -> Row:
        """Return the row of a sequence. One of a search gets it when it first runs."""
        row = self.rows.get(id)
        if row is None:
            request = self._requests[id]
            row = Row(
                id,
                request.id,
                request.sequences[0].num_prompt_tokens,
                request.params.priority,
                request.arrival,
            )
            self.rows[id] = self._open[id] = row
        return row

    def _run(self, chunk: Chunk, now: float) -> None:
        row = self._row(chunk.sequence.id)
        if row.admitted is None:
            row.admitted = now
        if not row.breaks or row.breaks[-1].until is not None:
            return
        last = row.breaks[-1]
        if last.phase != "prefill":
            last.until = now
            if row.first is None or (chunk.length == 1 and chunk.samples_token):
                return
            row.breaks.append(Break("prefill", now))
        if chunk.samples_token:
            self._recomputed.append(row)

    def _find_preempted(self, now: float) -> None:
        running = {id for group in self._strategy.running for id in group.sequence_ids}
        for id, row in self._open.items():
            is_waiting = row.breaks and row.breaks[-1].until is None
            if row.admitted is None or id in running:
                continue
            if is_waiting and row.breaks[-1].phase != "prefill":
                continue
            if is_waiting:
                row.breaks[-1].until = now
            is_swapped = self._strategy.memory.is_swapped(id)
            row.breaks.append(Break("swapped" if is_swapped else "preempted", now))

    def _end_answer(self, output: Output, finish: Finish) -> None:
        request = self._requests.get(output.request_id)
        is_whole = request is not None and (finish is Finish.ERROR or request.params.beam_width)
        ids = request.sequence_ids if request is not None and is_whole else ()
        for id in ids or (output.request_id + output.index,):
            self._end(id, finish.name.lower())

    def _end(self, id: int, reason: str) -> None:
        self._requests.pop(id, None)
        row = self._open.pop(id, None)
        if row is not None:
            row.end, row.ended_by = self._now(), reason
            if row.breaks and row.breaks[-1].until is None:
                row.breaks[-1].until = row.end
