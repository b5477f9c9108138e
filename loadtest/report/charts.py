"""Charts of the report as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.measures import filled, quantiles
from loadtest.report.rounds import in_rounds
from loadtest.report.style import GRID, INK, MUTED, colours, dashes, in_order, number
from loadtest.results import Run
from loadtest.tuning import TUNED, describe

Spec = dict[str, Any]
WIDTH = 1000
"""Width of the page in pixels."""
LEAST_S = 1e-3
"""Lower end of logarithmic axes; shorter gaps are between tokens that arrived together."""


def bars(runs: Sequence[Run]) -> Spec:
    """Return bar charts of requests/s and output tokens/s, with a column per workload.

    A bar is the median round; the line on it reaches from the lowest to the highest.
    """
    rows = [
        {
            "run": rounds.typical.label,
            "workload": rounds.typical.workload,
            "value": value,
            "low": min(values),
            "high": max(values),
            "text": number(value),
            "unit": unit,
        }
        for rounds in in_rounds(runs)
        for unit, value_of in (
            ("requests/s", lambda run: run.measures.requests_per_s),
            ("output tokens/s", lambda run: run.measures.tokens_per_s),
        )
        if (value := value_of(rounds.typical)) is not None
        and (values := [known for run in rounds.runs if (known := value_of(run)) is not None])
    ]
    workloads = list(dict.fromkeys(run.workload for run in runs))
    units = [
        unit for unit in ("requests/s", "output tokens/s") if any(r["unit"] == unit for r in rows)
    ]
    notes = {
        run.workload: [f"{run.name}: {describe(run.settings)}"] for run in runs if run.name == TUNED
    }
    rows_of_panels = [
        _unit_bars(rows, unit, workloads, {} if at else notes) for at, unit in enumerate(units)
    ]
    return {"vconcat": rows_of_panels, "spacing": 18}


def _unit_bars(
    rows: Sequence[Spec], unit: str, workloads: Sequence[str], notes: Mapping[str, Sequence[str]]
) -> Spec:
    """notes: subtitles, by workload."""
    labels = [row["run"] for row in rows]
    width = (WIDTH - 130 - 30 * len(workloads)) / len(workloads)
    x = {"field": "value", "type": "quantitative", "axis": None, "scale": {"nice": False}}
    y = {
        "field": "run",
        "type": "nominal",
        "sort": in_order(labels),
        "axis": {
            "title": None,
            "domain": False,
            "ticks": False,
            "labelColor": INK,
            "labelPadding": 8,
        },
    }
    panels = []
    for index, workload in enumerate(workloads):
        values = [row for row in rows if row["workload"] == workload and row["unit"] == unit]
        most = max(row["high"] for row in values)
        scale = {"domain": [0, 1.2 * most]}
        shown = y if index == 0 else {**y, "axis": None}
        panels.append(
            {
                "title": {"text": f"{workload}: {unit}", "subtitle": notes.get(workload, "")},
                "width": width,
                "height": {"step": 24},
                "data": {"values": values},
                "encoding": {"y": {**shown, "scale": {"domain": in_order(labels)}}},
                "layer": [
                    {
                        "mark": {"type": "bar", "cornerRadiusEnd": 2, "height": 16},
                        "encoding": {
                            "x": {**x, "scale": scale},
                            "color": _colour(labels, legend=False),
                        },
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
        )
    return {"hconcat": panels, "spacing": 30}


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
    """Return the batch size, and the KV cache allocated and filled, over time, a column per run."""
    runs = [run for run in runs if any(sample.metrics for sample in run.samples)]
    labels = [run.label for run in runs]
    shown = sorted(runs, key=lambda run: in_order(labels).index(run.label))
    most = max((max(_batches(run), default=0.0) for run in shown), default=1.0)
    width = (WIDTH - 60 - 24 * len(shown)) / max(2, len(shown))
    rows = (
        [_batch(run, width, most, labels, has_axis=run is shown[0]) for run in shown],
        [_memory(run, width, has_axis=run is shown[0]) for run in shown],
    )
    return {
        "vconcat": [{"hconcat": row, "spacing": 24, "bounds": "flush"} for row in rows],
        "spacing": 8,
        "resolve": {"scale": {"color": "independent"}},
    }


def _batches(run: Run) -> list[float]:
    return [sample.metrics["running"] for sample in run.samples if "running" in sample.metrics]


def _batch(run: Run, width: float, most: float, labels: Sequence[str], *, has_axis: bool) -> Spec:
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
                "scale": {"domain": [0, most]},
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
