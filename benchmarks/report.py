"""Collects what the sections found; as JSON with all of it, and as tables."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.sections import SECTIONS

MEASURES = ("us", "bytes", "flop")
UNITS = {"GB/s": "of copy", "TFLOP/s": "of matmul"}
"""Rates, and what a fraction of the best such rate among the ceilings is called."""


class Report:
    """Events of workers in, files and text out."""

    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.machine: dict[str, Any] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        self.table: dict[str, Any] | None = None
        self._current: dict[str, Any] = {}

    def take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "machine":
                self.machine = event["machine"]
            case "begin":
                self._current = self.section(event["section"])
            case "row":
                self._current["rows"].append(event["row"])
            case "note":
                self._current["notes"].append(event["text"])
            case "end":
                self._current["seconds"] = event["seconds"]
            case "table":
                self.table = event["table"]
            case other:
                raise ValueError(f"unknown event {other}")

    def section(self, name: str) -> dict[str, Any]:
        """`seconds` is None until the section has ended by itself."""
        return self.sections.setdefault(name, {"rows": [], "notes": [], "seconds": None})

    def is_sound(self, name: str) -> bool:
        """Whether the section ended by itself, and found nothing wrong.

        Elsewhere a case that failed is a case that is missing: a peer may not take it.
        """
        section = self.sections[name]
        fatal = ("section failed", "worker failed", *(["failed"] if name == "correctness" else []))
        return (
            section["seconds"] is not None
            and not any(row.get("verdict") == "WRONG" for row in section["rows"])
            and not any(text in note for note in section["notes"] for text in fatal)
        )

    def write(self, folder: Path) -> None:
        """gpu.json, and configurations.json where the sweep ran."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "date": self.date,
            "dry": self.is_dry,
            "machine": self.machine,
            "ceilings": self._ceilings(),
            "sections": {
                name: section | {"rows": [row | self._derived(row) for row in section["rows"]]}
                for name, section in self.sections.items()
            },
        }
        (folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        if self.table is not None:
            (folder / "configurations.json").write_text(table_text(self.table))

    def text(self) -> str:
        parts = [
            _section_text(SECTIONS[name].title, section, [self._cells(r) for r in section["rows"]])
            for name, section in self.sections.items()
        ]
        gpu = self.machine.get("gpu") or "no GPU"
        versions = self.machine.get("versions", {})
        named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        dry = "\nDry run: nothing was timed, so there are no figures." if self.is_dry else ""
        return "\n".join([*parts, f"{gpu}; {named}; {self.date}{dry}"])

    def _ceilings(self) -> dict[str, float]:
        """The best measured: GB/s of copies and TFLOP/s of products."""
        rows = self.sections.get("ceilings", {"rows": []})["rows"]
        rates = [_rate(row) for row in rows]
        return {
            unit: max(rate[unit] for rate in rates if unit in rate)
            for unit in UNITS
            if any(unit in rate for rate in rates)
        }

    def _derived(self, row: dict[str, Any]) -> dict[str, float]:
        """Rate of the first implementation, as a fraction of the ceiling, and against its peers.

        "best peer": the fastest other's time over ours, so more than 1 where ours is faster.
        """
        derived = _rate(row)
        for unit, rate in list(derived.items()):
            if unit in (ceilings := self._ceilings()):
                derived[UNITS[unit]] = round(rate / ceilings[unit], 3)
        ours, *others = row.get("us", {"": None}).values()
        others = [us for us in others if us is not None]
        if ours and others:
            derived["best peer"] = round(min(others) / ours, 2)
        return derived

    def _cells(self, row: dict[str, Any]) -> dict[str, str]:
        cells = {name: _cell(value) for name, value in row.items() if name not in MEASURES}
        for name, us in row.get("us", {}).items():
            cells[f"{name} us"] = "-" if us is None else f"{us:.1f}"
        for name, value in self._derived(row).items():
            cells[name] = f"{value:.0%}" if name in UNITS.values() else f"{value:.4g}"
        return cells


def table_text(table: dict[str, Any]) -> str:
    """Of configurations as kernels/configurations.json has it: one row a line."""
    parts = []
    for kernel, rows in table.items():
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        parts.append(f"  {json.dumps(kernel)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rate(row: dict[str, Any]) -> dict[str, float]:
    us = next(iter(row.get("us", {}).values()), None)
    if not us:
        return {}
    rates = {}
    if "bytes" in row:
        rates["GB/s"] = round(row["bytes"] / us / 1e3, 1)
    if "flop" in row:
        rates["TFLOP/s"] = round(row["flop"] / us / 1e6, 1)
    return rates


def _cell(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def _section_text(title: str, section: dict[str, Any], rows: list[dict[str, str]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    seconds = "unfinished" if section["seconds"] is None else f"{section['seconds']} s"
    notes = [f"  note: {note}" for note in section["notes"]]
    return "\n".join([f"## {title} ({seconds})", *cells, *notes, ""])
