"""Derived figures: rates, fractions of a ceiling, ratios to other implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.sections import SECTIONS

Row = dict[str, Any]
Figures = dict[str, float]
UNITS = {"GB/s": "of copy", "TFLOP/s": "of matmul"}
"""By the unit of a rate: the column with its fraction of the ceiling (`best_rates`)."""
ROOFLINE = "of roofline"
FRACTIONS = (*UNITS.values(), ROOFLINE, "GPU of roofline", "share")


def derived(section: str, row: Row, rows: Sequence[Row], ceilings: Figures) -> Figures:
    """Return the derived figures of a row. rows: all rows of its section."""
    if baselines := SECTIONS[section].baselines:
        return _against(baselines, row, rows)
    if section == "roofline":
        return _roofline(row, ceilings)
    return _rates_and_peers(row, ceilings)


def best_rates(rows: Sequence[Row]) -> Figures:
    """Return the ceilings: the highest GB/s of copies and TFLOP/s of matmuls."""
    found = [rates(row) for row in rows]
    return {
        unit: max(rate[unit] for rate in found if unit in rate)
        for unit in UNITS
        if any(unit in rate for rate in found)
    }


def rates(row: Row) -> Figures:
    """Return the rates of a row's first implementation, by unit."""
    us = next(iter(row.get("us", {}).values()), None)
    if not us:
        return {}
    found = {}
    if "bytes" in row:
        found["GB/s"] = round(row["bytes"] / us / 1e3, 1)
    if "flop" in row:
        found["TFLOP/s"] = round(row["flop"] / us / 1e6, 1)
    return found


def _rates_and_peers(row: Row, ceilings: Figures) -> Figures:
    """Return rates, fractions of the ceilings, and "best peer".

    If bytes and FLOPs are both known, the larger fraction is that of the roofline. "best peer" is
    the fastest other implementation's time over ours: above 1, ours is faster.
    """
    found = rates(row)
    for unit, rate in list(found.items()):
        if unit in ceilings:
            found[UNITS[unit]] = round(rate / ceilings[unit], 3)
    if found.keys() >= set(UNITS.values()):
        found[ROOFLINE] = max(found[name] for name in UNITS.values())
    ours, *others = row.get("us", {"": None}).values()
    others = [us for us in others if us is not None]
    if ours and others:
        found["best peer"] = round(min(others) / ours, 2)
    return found


def _against(baselines: Sequence[str], row: Row, rows: Sequence[Row]) -> Figures:
    """Return the ratio of requests/s to each baseline that ran."""
    by_case = {row["case"]: row["requests/s"] for row in rows}
    return {
        f"x {name}": round(row["requests/s"] / by_case[name], 2)
        for name in baselines
        if by_case.get(name) and row["requests/s"]
    }


def _roofline(row: Row, ceilings: Figures) -> Figures:
    """Return the time in which a copy moves as many bytes, and its share of each measured time."""
    if "GB/s" not in ceilings:
        return {}
    least_us = row["bytes"] / ceilings["GB/s"] / 1e3
    found = {"roofline us": round(least_us, 1)}
    for column, name in (("step us", ROOFLINE), ("GPU us", "GPU of roofline")):
        if row[column]:
            found[name] = round(least_us / row[column], 3)
    return found
