"""Time axes of the same scale. The axis of a long panel is broken where the least happens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from loadtest.report.style import INK, MUTED, number

MAX_STRETCH = 1.3
"""An axis is broken if it is longer than this, relative to the median panel's."""
GAP_SHARE = 0.02
"""Width of a break, as a share of the axis."""
MARGIN_SHARE = 0.02
"""The least share of a broken axis that stays visible at each end, and the share that stays visible
between the break and the event beside which it is put."""
TICK_STEPS = (1, 2, 5)
MAX_TICKS = 12
LABEL_SHARE = 0.09
"""Ticks closer than this share to the middle of a break have no label, to leave room for the
break's own label."""


class TimeSpan(NamedTuple):
    """A span of time, in seconds."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """An axis from zero that may leave out one span of time.

    Before the break, positions equal the time in seconds. After the break, they are smaller.
    """

    shown_s: float
    """Length of the axis, including the gap of a break, as the number of seconds that fit on it."""
    left_out: TimeSpan | None = None

    @property
    def gap_s(self) -> float:
        """Width of the break at the scale of the axis."""
        return GAP_SHARE * self.shown_s

    def position(self, at_s: float) -> float:
        """Return where a time is on the axis. All times left out are within the gap."""
        if self.left_out is None or at_s <= self.left_out.start_s:
            return at_s
        start_s, end_s = self.left_out
        if at_s >= end_s:
            return start_s + self.gap_s + at_s - end_s
        return start_s + self.gap_s * (at_s - start_s) / (end_s - start_s)

    def encoding(self, field: str, title: str | None) -> dict[str, Any]:
        """Return the Vega-Lite x channel for a field that holds positions."""
        axis: dict[str, Any] = {"title": title, "values": self._ticks()}
        if self.left_out is not None:
            start_s, end_s = self.left_out
            middle = start_s + self.gap_s / 2
            time = f"datum.value + (datum.value > {middle} ? {end_s - start_s - self.gap_s} : 0)"
            is_far = f"abs(datum.value - {middle}) > {LABEL_SHARE * self.shown_s}"
            axis["labelExpr"] = f"{is_far} ? format({time}, '~g') : ''"
        return {
            "field": field,
            "type": "quantitative",
            "scale": {"domain": [0, self.shown_s], "nice": False},
            "axis": {**axis, "format": "~g"},
        }

    def break_layers(self) -> list[dict[str, Any]]:
        """Return the Vega-Lite layers that mark the break: a white gap, its edges, its length."""
        if self.left_out is None:
            return []
        start_s, end_s = self.left_out
        edges = [start_s, start_s + self.gap_s]
        gap = {"data": {"values": [{"left": edges[0], "right": edges[1]}]}}
        x = {"field": "left", "type": "quantitative"}
        label = {"type": "text", "align": "center", "dy": 13, "fontSize": 11, "color": INK}
        return [
            {
                **gap,
                "mark": {"type": "rect", "color": "white"},
                "encoding": {"x": x, "x2": {"field": "right"}},
            },
            {
                "data": {"values": [{"left": edge} for edge in edges]},
                "mark": {"type": "rule", "color": MUTED, "strokeDash": [3, 2]},
                "encoding": {"x": x},
            },
            {
                "data": {"values": [{"left": sum(edges) / 2}]},
                "mark": {**label, "text": f"{number(end_s - start_s)} s left out"},
                "encoding": {"x": x, "y": {"value": "height"}},
            },
        ]

    def _ticks(self) -> list[float]:
        """Return the positions of the ticks, which stand at round times."""
        step = _round_step(self.shown_s / MAX_TICKS)
        end_s = self.shown_s
        if self.left_out is not None:
            end_s += self.left_out.end_s - self.left_out.start_s - self.gap_s
        times = [index * step for index in range(int(end_s / step + 1e-9) + 1)]
        return [self.position(at_s) for at_s in times if not self._is_left_out(at_s)]

    def _is_left_out(self, at_s: float) -> bool:
        return self.left_out is not None and self.left_out.start_s < at_s < self.left_out.end_s


def time_axes(events: Mapping[str, Sequence[float]]) -> dict[str, TimeAxis]:
    """Return an axis for each panel, all of one scale.

    events: the times in seconds at which something begins or ends, at least one per panel. All axes
    have the length of the longest one that needs no break.
    """
    ends = sorted(max(times) for times in events.values())
    longest = MAX_STRETCH * ends[(len(ends) - 1) // 2]
    shown_s = max(end for end in ends if end <= longest)
    return {
        label: TimeAxis(shown_s, None if max(times) <= shown_s else _calmest(times, shown_s))
        for label, times in events.items()
    }


def _calmest(times: Sequence[float], shown_s: float) -> TimeSpan:
    """Of the spans that make the axis short enough, return the one with the fewest events.

    Of several such spans, return the one closest to the middle of the axis.
    """
    length = max(times) - shown_s * (1 - GAP_SHARE)
    margin = MARGIN_SHARE * shown_s
    last = shown_s * (1 - GAP_SHARE) - margin
    near = [at + margin for at in times] + [at - length - margin for at in times]
    starts = [start for start in near if margin <= start <= last] or [last / 2]

    def cost(start: float) -> tuple[int, float]:
        return sum(start < at < start + length for at in times), abs(start - last / 2)

    start = min(starts, key=cost)
    return TimeSpan(start, start + length)


def _round_step(minimum: float) -> float:
    """Return the smallest number from `minimum` that is 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(minimum))
    return next(step * power for step in (*TICK_STEPS, 10) if step * power >= minimum)
