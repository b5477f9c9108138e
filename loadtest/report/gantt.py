"""Gantt charts of the first requests of each run: waiting, prefill, decoding and padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from loadtest.load.record import Record
from loadtest.report.charts import WIDTH, Spec
from loadtest.report.style import LEGEND, STAGES, number, percent
from loadtest.study.results import Run
from loadtest.study.tuning import describe

NUM_SHOWN = 24
ROW_PIXELS = 6
MAX_STRETCH = 1.3
"""A panel is cut if it is longer than this, relative to the median panel."""


class Bar(NamedTuple):
    """A stage of a request, in seconds since the first request arrived."""

    request: int
    stage: str
    start_s: float
    end_s: float


def gantt(runs: Sequence[Run]) -> Spec | None:
    """Return a panel per run with a row per request, all of one scale; None if no run has bars.

    A run that takes much longer than others is cut, and its panel says so.
    """
    by_label = {run.label: run for run in runs}
    bars = {label: list(bars_of(run, NUM_SHOWN)) for label, run in by_label.items()}
    shown = {label: found for label, found in bars.items() if found}
    if not shown:
        return None
    ends = sorted(_end_s(found) for found in shown.values())
    longest = MAX_STRETCH * ends[(len(ends) - 1) // 2]
    shown_s = max(end for end in ends if end <= longest)
    panels = [
        _panel(by_label[label], found, shown_s, is_last=label == list(shown)[-1])
        for label, found in shown.items()
    ]
    return {"vconcat": panels, "spacing": 14, "resolve": {"scale": {"color": "independent"}}}


def bars_of(run: Run, count: int) -> Iterator[Bar]:
    """Yield the stages of the first `count` successful requests, in order of arrival.

    Uses the server's timings if every request has them, otherwise the client's times.
    """
    good = [record for record in run.records if record.is_good]
    is_timed = bool(good) and all(record.timings is not None for record in good)
    ends = _batch_ends(good) if is_timed and run.strategy == "dynamic" else {}
    begin_of = _arrived if is_timed else attrgetter("sent_s")
    first = sorted(good, key=begin_of)[:count]
    start = min(map(begin_of, first), default=0.0)
    for row, record in enumerate(first):
        for stage, begin, end in _stages(record, ends, is_timed=is_timed):
            if end > begin:
                yield Bar(row, stage, begin - start, end - start)


def padding_share(run: Run) -> float | None:
    """Return the share of batch slot time that finished requests held; None if not dynamic."""
    bars = list(bars_of(run, len(run.records)))
    occupied = sum(bar.end_s - bar.start_s for bar in bars if bar.stage != "waiting")
    padding = sum(bar.end_s - bar.start_s for bar in bars if bar.stage == "padding")
    return padding / occupied if occupied and run.strategy == "dynamic" else None


def _stages(
    record: Record, batch_ends: dict[float, float], *, is_timed: bool
) -> Iterator[tuple[str, float, float]]:
    timings = record.timings
    if timings is None or not is_timed:  # a client cannot tell queueing from prefill
        first = record.first_s if record.first_s is not None else record.finished_s
        yield "waiting", record.sent_s, first
        yield "decoding", first, record.finished_s
        return
    yield "waiting", timings.arrived, timings.admitted
    yield "prefill", timings.admitted, timings.first_token
    yield "decoding", timings.first_token, timings.finished
    yield "padding", timings.finished, batch_ends.get(timings.admitted, timings.finished)


def _batch_ends(records: Sequence[Record]) -> dict[float, float]:
    """Return when the last request of each batch finished, by the admission time of all of them."""
    ends: dict[float, float] = {}
    for record in records:
        if record.timings is not None:
            admitted, finished = record.timings.admitted, record.timings.finished
            ends[admitted] = max(ends.get(admitted, finished), finished)
    return ends


def _arrived(record: Record) -> float:
    return record.timings.arrived if record.timings is not None else record.sent_s


def _facts(run: Run) -> list[str]:
    """Return the subtitle's lines: the largest batch, then how full memory and batch slots were."""
    if not run.batches:
        return []
    setting = f"{describe(run.settings)}; " if run.strategy == "dynamic" else ""
    shares = [
        (run.measures.inside.kv_filled, "of the held KV memory is filled"),
        (padding_share(run), "of slot time is padding"),
    ]
    known = [f"{percent(share)} {what}" for share, what in shares if share is not None]
    return [
        f"{setting}at most {number(max(run.batches))} at once",
        *filter(None, ["; ".join(known)]),
    ]


def _end_s(bars: Sequence[Bar]) -> float:
    return max(bar.end_s for bar in bars)


def _panel(run: Run, bars: Sequence[Bar], shown_s: float, *, is_last: bool) -> Spec:
    """shown_s: the length of the time axis in seconds."""
    rows = [
        {"request": bar.request, "stage": bar.stage, "from": bar.start_s, "to": bar.end_s}
        for bar in bars
    ]
    end_s = _end_s(bars)
    cut = [f"the last of them ends after {number(end_s)} s"] if end_s > shown_s else []
    return {
        "title": {"text": run.label, "subtitle": [*_facts(run), *cut]},
        "width": WIDTH - 40,
        "height": {"step": ROW_PIXELS},
        "data": {"values": rows},
        "mark": {"type": "bar", "height": ROW_PIXELS - 1.5, "clip": True},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "scale": {"domain": [0, shown_s], "nice": False},
                "axis": {"title": "seconds" if is_last else None, "format": "~g"},
            },
            "x2": {"field": "to"},
            "y": {"field": "request", "type": "ordinal", "axis": None},
            "color": {
                "field": "stage",
                "scale": {"domain": list(STAGES), "range": list(STAGES.values())},
                "legend": LEGEND if is_last else None,
            },
            "tooltip": [
                {"field": "stage"},
                {"field": "from", "format": ".2f"},
                {"field": "to", "format": ".2f"},
            ],
        },
    }
