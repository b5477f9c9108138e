"""Draws the results of `benchmarks.speculation`: what steps cost, and what drafts gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from strategies.speculation.costs import ACCEPTANCES, StepCosts

Spec = dict[str, Any]
COLOURS = ("#15866a", "#3f7fc1", "#d9892b", "#9a7cc9", "#b2463c")
"""By the number of users, the fewest first."""
DRAFTED, PLAIN = COLOURS[1], "#667382"
INK, MUTED, GRID = "#1d2733", "#667382", "#e8ecf0"
CONFIG = {
    "font": "Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED, "titleColor": MUTED, "titleFontWeight": "normal", "gridColor": GRID,
        "domainColor": "#c3cbd4", "tickColor": "#c3cbd4",
    },
    "legend": {"labelColor": INK, "orient": "bottom", "title": None},
    "title": {"color": INK, "fontSize": 13, "anchor": "start", "offset": 12},
}  # fmt: skip
SIZE = {"width": 380, "height": 240}


def ideal_gain(costs: StepCosts, users: int, acceptance: float, most_drafts: int) -> float:
    """Return the highest gain that the costs allow, with up to so many drafts of each sequence.

    acceptance: the probability that a draft is right if those before it are.
    """
    plain = costs.of(users)
    return max(
        plain
        / (costs.of(users, users * count) + costs.proposing(count, users * count))
        * sum(acceptance**power for power in range(count + 1))
        for count in range(most_drafts + 1)
    )


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write an SVG. results: what `benchmarks.speculation --out` writes."""
    import vl_convert  # the load test's, of the extra "loadtest"

    costs = msgspec.convert(results["costs"], StepCosts)
    charts = [_costs(costs), _gains(costs, results["gains"], results["arguments"]["drafts"])]
    spec = {
        "hconcat": charts,
        "spacing": 40,
        "resolve": {"scale": {"color": "independent"}},
        "config": CONFIG,
        "background": "white",
        "padding": 12,
    }
    path.write_text(vl_convert.vegalite_to_svg(spec))


def _costs(costs: StepCosts) -> Spec:
    kinds = {"decodes only": costs.plain, f"{costs.width} rows a sequence": costs.drafted}
    values = [
        {"kind": kind, "rows": rows, "ms": 1000 * table[rows]}
        for kind, table in kinds.items()
        for rows in range(1, len(table))
    ]
    return SIZE | {
        "title": "Cost of a step",
        "data": {"values": values},
        "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 16}},
        "encoding": {
            "x": _quantity("rows", "rows: tokens computed in a step"),
            "y": _quantity("ms", "ms"),
            "color": _colour("kind", list(kinds), (PLAIN, DRAFTED)),
        },
    }


def _gains(costs: StepCosts, gains: Sequence[Mapping[str, Any]], most_drafts: int) -> Spec:
    """Return the gains of given shares as points, with the range of the rounds, beside lines."""
    given = [gain for gain in gains if gain["what"].startswith("given")]
    users = sorted({gain["users"] for gain in given})
    ideal = [
        {"users": _name(count), "p": p, "gain": ideal_gain(costs, count, p, most_drafts)}
        for count in users
        for p in ACCEPTANCES
    ]
    measured = [
        gain | {"users": _name(gain["users"]), "p": float(gain["what"].split()[1])}
        for gain in map(dict, given)
    ]
    x = _quantity("p", "probability that a draft is right")
    y = _quantity("gain", "tokens per second, beside steps without drafts")
    colour = _colour("users", [_name(count) for count in users], COLOURS[: len(users)])
    rule = {"x": x, "y": {**y, "field": "lowest"}, "y2": {"field": "highest"}, "color": colour}
    return SIZE | {
        "title": "Gain: lines are the ideal of these costs, points are measured",
        "layer": [
            {
                "data": {"values": ideal},
                "mark": {"type": "line", "strokeWidth": 1.5},
                "encoding": {"x": x, "y": y, "color": colour},
            },
            {
                "data": {"values": measured},
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": rule,
            },
            {
                "data": {"values": measured},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": colour},
            },
        ],
    }


def _name(users: int) -> str:
    return f"{users} user{'s' if users > 1 else ''}"


def _quantity(field: str, title: str) -> Spec:
    axis = {"title": title, "tickCount": 6}
    return {
        "field": field,
        "type": "quantitative",
        "axis": axis,
        "scale": {"zero": field != "gain"},
    }


def _colour(field: str, names: Sequence[str], colours: Sequence[str]) -> Spec:
    scale = {"domain": list(names), "range": list(colours)}
    return {"field": field, "type": "nominal", "scale": scale, "sort": list(names)}
