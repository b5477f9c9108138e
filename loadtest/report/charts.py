"""Charts of the report as Vega-Lite specifications."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loadtest.report.leading import LATENCY, THROUGHPUT, TOKENS, Measure
from loadtest.report.regime import conditions
from loadtest.report.rounds import Rounds, in_rounds, labels_of
from loadtest.report.style import GRID, INK, MUTED, colours, dashes
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
    x = {
        "field": "value", "type": "quantitative", "axis": None,
        "scale": {"nice": False, "domain": [0, 1.2 * highest]},
    }  # fmt: skip
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
                "encoding": {"x": x, "color": _colour(labels, legend=False)},
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
        (
            "end-to-end latency",
            lambda run: quantiles(r.latency_s for r in run.records if r.is_good),
        ),
        (
            "time to first token",
            lambda run: quantiles(
                r.first_token_s for r in run.records if r.is_good and r.first_token_s is not None
            ),
        ),
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


def _distribution(
    rows: Sequence[Spec], labels: Sequence[str], title: str, *, has_axis: bool
) -> Spec:
    return {
        "title": title,
        "width": (WIDTH - 215) / 3,
        "height": 190,
        "data": {"values": rows},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.8, "clip": True},
        "encoding": {
            "x": {
                "field": "seconds",
                "type": "quantitative",
                "scale": {"type": "log", "nice": False},
                "axis": {
                    "title": "seconds (log scale)",
                    "tickCount": 4,
                    "format": "~g",
                    "grid": False,
                },
            },
            "y": {
                "field": "share",
                "type": "quantitative",
                "axis": {
                    "title": "cumulative share" if has_axis else None,
                    "format": ".0%",
                    "values": [0, 0.25, 0.5, 0.75, 1],
                },
            },
            "order": {"field": "share"},
            "color": _colour(labels),
            "strokeDash": _dash(labels),
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
    highest = max((max(_batches(run), default=0.0) for run in runs), default=1.0)
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


def _batches(run: Run) -> list[float]:
    return [sample.metrics["running"] for sample in run.samples if "running" in sample.metrics]


def _batch(
    run: Run, width: float, highest: float, labels: Sequence[str], *, has_axis: bool
) -> Spec:
    values = [
        {"at": round(sample.at_s, 2), "running": sample.metrics["running"]}
        for sample in run.samples
        if "running" in sample.metrics
    ]
    colour = colours(labels)[run.label]
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
            "y": {
                "field": "running",
                "type": "quantitative",
                "scale": {"domain": [0, highest]},
                "axis": {"title": "batch size", "tickCount": 4} if has_axis else None,
            },
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
            "y": {
                "field": "share",
                "type": "quantitative",
                "stack": None,
                "scale": {"domain": [0, 1]},
                "axis": axis,
            },
            "color": {
                "field": "kind",
                "scale": {"domain": ["allocated", "filled"], "range": ["#d3dae3", "#46678c"]},
                "legend": {"orient": "bottom", "direction": "horizontal"} if has_axis else None,
            },
        },
    }


def rates(runs: Sequence[Run], bound: str, limit_s: float, values: Sequence[float | None]) -> Spec:
    """Return the measured value of an objective's bound at each rate, with the limit as a line."""
    rows = [
        {"run": run.label, "rate": run.rate, "seconds": max(value, LEAST_S)}
        for run, value in zip(runs, values, strict=True)
        if value is not None
    ]
    x = {"field": "rate", "type": "quantitative", "axis": {"title": "requests/s sent"}}
    y = {
        "field": "seconds",
        "type": "quantitative",
        "scale": {"type": "log"},
        "axis": {"title": "seconds (log scale)", "tickCount": 5, "format": "~g"},
    }
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
                    "color": _colour([run.label for run in runs]),
                    "strokeDash": _dash([run.label for run in runs]),
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
    return {"field": "at", "type": "quantitative", "axis": axis, "scale": {"nice": False}}


def _dash(labels: Sequence[str]) -> Spec:
    table = dashes(labels)
    return {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": list(table), "range": list(table.values())},
        "legend": {"orient": "bottom", "direction": "horizontal"},
    }


def _colour(labels: Sequence[str], *, legend: bool = True) -> Spec:
    table = colours(labels)
    return {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": list(table), "range": list(table.values())},
        "legend": {"orient": "bottom", "direction": "horizontal"} if legend else None,
    }
