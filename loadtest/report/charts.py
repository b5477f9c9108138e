"""Charts of the report as Vega-Lite specifications."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.report.leading import LATENCY, THROUGHPUT, TOKENS, Measure
from loadtest.report.regime import conditions
from loadtest.report.rounds import Rounds, in_rounds, labels_of
from loadtest.report.style import GRID, INK, LEGEND, MUTED, colours, dashes
from loadtest.study.measures import filled, quantiles
from loadtest.study.results import Run
from loadtest.study.tuning import TUNED, describe

Spec = dict[str, Any]
WIDTH = 1000
"""Width of the page in pixels."""
LEAST_S = 1e-3
"""Lower end of logarithmic axes; shorter gaps are between tokens that arrived together."""


def bars(runs: Sequence[Run]) -> Spec:
    """Return bar charts, a column per workload: the leading measure, and another one below it.

    A bar shows the median round. The line on it reaches from the lowest round to the highest.
    """
    found = in_rounds(runs)
    labels = labels_of(found)
    columns = [
        [rounds for rounds in found if rounds.workload == workload]
        for workload in dict.fromkeys(rounds.workload for rounds in found)
    ]
    width = (WIDTH - 130 - 30 * len(columns)) / len(columns)
    leading = [_bars(column, column[0].measure, labels, width) for column in columns]
    for panel, column in zip(leading, columns, strict=True):
        panel["title"]["subtitle"] = _notes([run for rounds in column for run in rounds.runs])
    others = [_bars(column, _BELOW[column[0].measure], labels, width) for column in columns]
    rows = [leading, others] if any(panel["data"]["values"] for panel in others) else [leading]
    for row in rows:
        for panel in row[1:]:
            panel["encoding"]["y"]["axis"] = None
    return {"vconcat": [{"hconcat": row, "spacing": 30} for row in rows], "spacing": 18}


_BELOW = {THROUGHPUT: TOKENS, LATENCY: THROUGHPUT}
"""The measure in the second panel of a workload, by the leading measure."""


def _notes(runs: Sequence[Run]) -> list[str]:
    """Return the subtitle of a workload: its conditions, and the setting of the tuned server."""
    tuned = (f"{run.name}: {describe(run.settings)}" for run in runs if run.name == TUNED)
    return list(dict.fromkeys([*conditions(runs), *tuned]))


def _bars(servers: Sequence[Rounds], measure: Measure, labels: Sequence[str], width: float) -> Spec:
    """Return a bar chart of the servers of one workload. labels: all rows of the page, in order."""
    values = [
        {
            "run": rounds.label,
            "value": value,
            "low": min(spread),
            "high": max(spread),
            "text": measure.text(value),
        }
        for rounds in servers
        if math.isfinite(value := measure.value(rounds.typical))
        and (spread := [v for v in map(measure.value, rounds.runs) if math.isfinite(v)])
    ]
    highest = max((row["high"] for row in values), default=1.0)
    x = _quantitative("value", None, {"nice": False, "domain": [0, 1.2 * highest]})
    axis = {"title": None, "domain": False, "ticks": False, "labelColor": INK, "labelPadding": 8}
    title = f"{servers[0].workload}: {measure.title}{', less is better' if measure.is_cost else ''}"
    return {
        "title": {"text": title, "subtitle": ""},
        "width": width,
        "height": {"step": 24},
        "data": {"values": values},
        "encoding": {
            "y": {"field": "run", "type": "nominal", "axis": axis, "scale": {"domain": labels}}
        },
        "layer": [
            {
                "mark": {"type": "bar", "cornerRadiusEnd": 2, "height": 16},
                "encoding": {"x": x, "color": _by_run(colours(labels), legend=False)},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5, "color": INK},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "color": INK},
                "encoding": {"x": {**x, "field": "high"}, "text": {"field": "text"}},
            },
        ],
    }


def latencies(runs: Sequence[Run]) -> Spec:
    """Return cumulative distributions of latency, time to first token and inter-token latency."""
    labels = [run.label for run in runs]
    panels = []
    for title, values_of in (
        ("end-to-end latency", lambda run: _of_records(run, "latency_s")),
        ("time to first token", lambda run: _of_records(run, "first_token_s")),
        ("inter-token latency", lambda run: run.gap_quantiles_s),
    ):
        rows = [
            {"run": run.label, "seconds": max(seconds, LEAST_S), "share": i / (len(values) - 1)}
            for run in runs
            if (values := values_of(run))
            for i, seconds in enumerate(values)
        ]
        if rows:
            panels.append(_distribution(rows, labels, title, has_axis=not panels))
    return {"hconcat": panels, "spacing": 34}


def _of_records(run: Run, name: str) -> list[float]:
    seconds = (getattr(record, name) for record in run.records if record.is_good)
    return quantiles(value for value in seconds if value is not None)


def _distribution(
    rows: Sequence[Spec], labels: Sequence[str], title: str, *, has_axis: bool
) -> Spec:
    x_axis = {"title": "seconds (log scale)", "tickCount": 4, "format": "~g", "grid": False}
    y_title = "cumulative share" if has_axis else None
    y_axis = {"title": y_title, "format": ".0%", "values": [0, 0.25, 0.5, 0.75, 1]}
    return {
        "title": title,
        "width": (WIDTH - 215) / 3,
        "height": 190,
        "data": {"values": rows},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.8, "clip": True},
        "encoding": {
            "x": _quantitative("seconds", x_axis, {"type": "log", "nice": False}),
            "y": _quantitative("share", y_axis),
            "order": {"field": "share"},
            "color": _by_run(colours(labels)),
            "strokeDash": _by_run(dashes(labels)),
            "tooltip": [
                {"field": "run", "title": "run"},
                {"field": "share", "format": ".1%"},
                {"field": "seconds", "format": ".3~g"},
            ],
        },
    }


def timelines(runs: Sequence[Run]) -> Spec:
    """Return charts over time, a column per run: batch size, and KV cache allocated and filled."""
    runs = [run for run in runs if any(sample.metrics for sample in run.samples)]
    labels = [run.label for run in runs]
    highest = max((max(run.batches, default=0.0) for run in runs), default=1.0)
    width = (WIDTH - 60 - 24 * len(runs)) / max(2, len(runs))
    rows = (
        [_batch(run, width, highest, labels, has_axis=run is runs[0]) for run in runs],
        [_memory(run, width, has_axis=run is runs[0]) for run in runs],
    )
    return {
        "vconcat": [{"hconcat": row, "spacing": 24, "bounds": "flush"} for row in rows],
        "spacing": 8,
        "resolve": {"scale": {"color": "independent"}},
    }


def _batch(
    run: Run, width: float, highest: float, labels: Sequence[str], *, has_axis: bool
) -> Spec:
    values = [
        {"at": round(sample.at_s, 2), "running": sample.metrics["running"]}
        for sample in run.samples
        if "running" in sample.metrics
    ]
    colour = colours(labels)[run.label]
    axis = {"title": "batch size", "tickCount": 4} if has_axis else None
    return {
        "title": run.label,
        "width": width,
        "height": 80,
        "data": {"values": values},
        "mark": {
            "type": "area", "interpolate": "step-after", "color": colour, "opacity": 0.25,
            "line": {"color": colour, "strokeWidth": 1.3, "interpolate": "step-after"},
        },
        "encoding": {
            "x": _seconds(None),
            "y": _quantitative("running", axis, {"domain": [0, highest]}),
        },
    }  # fmt: skip


def _memory(run: Run, width: float, *, has_axis: bool) -> Spec:
    values = [
        {"at": round(sample.at_s, 2), "share": share, "kind": kind}
        for sample in run.samples
        for kind, share in (
            ("allocated", sample.metrics.get("kv_used")),
            ("filled", filled(sample.metrics)),
        )
        if share is not None
    ]
    axis = {"title": "KV cache", "format": ".0%", "values": [0, 0.5, 1]} if has_axis else None
    return {
        "width": width,
        "height": 80,
        "data": {"values": values},
        "mark": {"type": "area", "interpolate": "step-after"},
        "encoding": {
            "x": _seconds("seconds"),
            "y": {**_quantitative("share", axis, {"domain": [0, 1]}), "stack": None},
            "color": {
                "field": "kind",
                "scale": {"domain": ["allocated", "filled"], "range": ["#d3dae3", "#46678c"]},
                "legend": LEGEND if has_axis else None,
            },
        },
    }


def rates(runs: Sequence[Run], bound: str, limit_s: float, values: Sequence[float | None]) -> Spec:
    """Return the measured value of an objective's bound at each rate, with the limit as a line."""
    labels = [run.label for run in runs]
    rows = [
        {"run": run.label, "rate": run.rate, "seconds": max(value, LEAST_S)}
        for run, value in zip(runs, values, strict=True)
        if value is not None
    ]
    x = _quantitative("rate", {"title": "requests/s sent"})
    axis = {"title": "seconds (log scale)", "tickCount": 5, "format": "~g"}
    y = _quantitative("seconds", axis, {"type": "log"})
    return {
        "title": bound,
        "width": (WIDTH - 130) / 2,
        "height": 220,
        "layer": [
            {
                "data": {"values": rows},
                "mark": {"type": "line", "point": {"size": 36}, "strokeWidth": 1.8},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": _by_run(colours(labels)),
                    "strokeDash": _by_run(dashes(labels)),
                },
            },
            {
                "data": {"values": [{"seconds": limit_s}]},
                "mark": {"type": "rule", "strokeDash": [5, 4], "color": MUTED},
                "encoding": {"y": y},
            },
        ],
    }


def _seconds(title: str | None) -> Spec:
    axis = {"title": title, "tickCount": 4, "gridColor": GRID}
    return _quantitative("at", axis, {"nice": False})


def _quantitative(field: str, axis: Spec | None, scale: Spec | None = None) -> Spec:
    channel = {"field": field, "type": "quantitative", "axis": axis}
    return channel if scale is None else {**channel, "scale": scale}


def _by_run(table: Mapping[str, object], *, legend: bool = True) -> Spec:
    """table: the colour or the dashes of each label."""
    return {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": list(table), "range": list(table.values())},
        "legend": LEGEND if legend else None,
    }
