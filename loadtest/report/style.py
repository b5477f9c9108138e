"""Colours, identical for a strategy in every chart, and number formats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from loadtest.study.tuning import TUNED

STRATEGIES = {
    "none": "#8a94a1",
    "dynamic": "#d9892b",
    TUNED: "#d9892b",
    "continuous": "#3f7fc1",
    "paged": "#15866a",
}
"""Colours by strategy, from the simplest to the most efficient one. Legends keep this order, and so
do rows of tables, unless latencies are compared: then the shortest comes first (rounds.py)."""
OURS = tuple(name for name in STRATEGIES if name != TUNED)
"""Names of our strategies, in the same order."""
OTHER = "#566270"
"""Colour of all servers that are not ours; in line charts they differ in dashes."""
SOLID = (1, 0)
TUNED_DASH = (5, 3)
OTHER_DASHES = (SOLID, (2, 2), (9, 3), (9, 3, 2, 3))
STAGES = {
    "waiting": "#dfe4ea",
    "prefill": "#9a7cc9",
    "decoding": "#46678c",
    "padding": "#f2b8ae",
}
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, sans-serif"
INK, MUTED, GRID = "#1d2733", "#667382", "#e8ecf0"
LEGEND = {"orient": "bottom", "direction": "horizontal"}
UNKNOWN = "-"
"""Table cell of an unknown value."""

CONFIG = {
    "font": FONT,
    "background": "transparent",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED, "titleColor": MUTED, "titleFontWeight": "normal", "labelFontSize": 11,
        "titleFontSize": 11, "gridColor": GRID, "domainColor": "#c3cbd4", "tickColor": "#c3cbd4",
    },
    "legend": {"labelColor": INK, "labelFontSize": 11, "labelLimit": 300, "title": None},
    "header": {
        "labelColor": INK, "labelFontSize": 12, "labelFontWeight": 600, "title": None,
        "labelAnchor": "start",
    },
    "title": {
        "color": INK, "fontSize": 12, "fontWeight": 600, "anchor": "start", "frame": "group",
        "subtitleColor": MUTED, "subtitleFontSize": 11,
    },
}  # fmt: skip
"""Vega-Lite configuration of every chart."""


def in_order(labels: Sequence[str]) -> list[str]:
    """Return the distinct labels: strategies in order, each before its variants, then others."""
    known = list(STRATEGIES)

    def rank(label: str) -> tuple[int, bool]:
        name, _, variant = label.partition(", ")
        return known.index(name) if name in known else len(known), bool(variant)

    return sorted(dict.fromkeys(labels), key=rank)


def colours(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each label. Colours only stand for strategies."""
    return {label: STRATEGIES.get(label.partition(", ")[0], OTHER) for label in in_order(labels)}


def dashes(labels: Sequence[str]) -> dict[str, Sequence[int]]:
    """Return the lengths of a line's dashes and gaps for each label.

    The lines of up to four labels that are not strategies differ: of variants and other servers.
    """
    others = itertools.cycle(OTHER_DASHES)
    by_label: dict[str, Sequence[int]] = {}
    for label in in_order(labels):
        known = TUNED_DASH if label == TUNED else SOLID
        by_label[label] = known if label in STRATEGIES else next(others)
    return by_label


def number(value: float | None, digits: int = 3) -> str:
    """Format with `digits` significant digits, but show integers and integer parts in full."""
    if value is None:
        return UNKNOWN
    if value == int(value) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{decimals}f}"


def duration(seconds: float | None) -> str:
    """Format in seconds, or in milliseconds below one second."""
    if seconds is None:
        return UNKNOWN
    return f"{number(seconds)} s" if seconds >= 0.9995 else f"{number(1000 * seconds)} ms"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{number(100 * share, 2)} %"


def ratio_text(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.2f}×"
