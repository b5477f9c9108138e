"""Collects the sections' results and writes them as JSON and as tables."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.derived import FRACTIONS, Figures, Row, best_rates, derived
from benchmarks.gpu.sections import SECTIONS, section_of

ALL_OURS = ("correctness", "roofline", "mixed")
"""Sections that run only our own code, so that a failed case is our error."""
MEASURES = ("us", "bytes", "flop")
"""Fields of a row that tables show only as figures derived from them."""


class Report:
    """Turns the events of workers into gpu.json and tables."""

    def __init__(self, *, is_dry: bool, shape: str = "llama-2-7b") -> None:
        self.is_dry = is_dry
        self.shape = shape
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
                self._current = self.section(section_of(event["job"]))
            case "row":
                self._current["rows"].append(event["row"])
            case "note":
                if event["text"] not in self._current["notes"]:  # another case may have added it
                    self._current["notes"].append(event["text"])
            case "end":
                before = self._current["seconds"] or 0
                self._current["seconds"] = round(before + event["seconds"], 1)
            case "table":
                self.table = event["table"]
            case other:
                raise ValueError(f"unknown event {other}")

    def section(self, name: str) -> dict[str, Any]:
        """Return a section's results. `seconds` is None until the section or a case has ended."""
        return self.sections.setdefault(name, {"rows": [], "notes": [], "seconds": None})

    def is_sound(self, name: str) -> bool:
        """Return whether the section ran to its end and found no wrong result.

        A failed case makes only a section in ALL_OURS unsound; in the others, an implementation
        may not support every case.
        """
        if name not in self.sections:
            return False  # no worker has reached it
        section = self.sections[name]
        fatal = ["failed"] if name in ALL_OURS else ["section failed", "worker failed"]
        return (
            section["seconds"] is not None
            and not any(row.get("verdict") == "WRONG" for row in section["rows"])
            and not any(text in note for note in section["notes"] for text in fatal)
        )

    def write(self, folder: Path) -> None:
        """Write gpu.json, and configurations.json if the sweep ran."""
        folder.mkdir(parents=True, exist_ok=True)
        results = {
            "date": self.date,
            "dry": self.is_dry,
            "shape": self.shape,
            "machine": self.machine,
            "ceilings": self._ceilings(),
            "sections": {
                name: section | {"rows": [row | figures for row, figures in self.rows(name)]}
                for name, section in self.sections.items()
            },
        }
        (folder / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        if self.table is not None:
            (folder / "configurations.json").write_text(table_text(self.table))

    def text(self) -> str:
        parts = [
            _section_text(
                SECTIONS[name].title,
                section,
                [_cells(row, figures) for row, figures in self.rows(name)],
            )
            for name, section in self.sections.items()
        ]
        gpu = self.machine.get("gpu") or "no GPU"
        versions = self.machine.get("versions", {})
        packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        dry = "\nDry run: nothing was timed." if self.is_dry else ""
        return "\n".join([*parts, f"{gpu}; {packages}; {self.date}{dry}"])

    def _ceilings(self) -> dict[str, float]:
        return best_rates(self.sections.get("ceilings", {"rows": []})["rows"])

    def rows(self, name: str) -> list[tuple[Row, Figures]]:
        """Return a section's measured rows, each with the figures derived from it."""
        rows, ceilings = self.sections[name]["rows"], self._ceilings()
        return [(row, derived(name, row, rows, ceilings)) for row in rows]


def table_text(table: dict[str, Any]) -> str:
    """Format a configuration table like kernels/configurations.json, one row per line."""
    parts = []
    for kernel, rows in table.items():
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        parts.append(f"  {json.dumps(kernel)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _cells(row: Row, figures: Figures) -> dict[str, str]:
    cells: dict[str, str] = {}
    for name, value in row.items():
        if isinstance(value, dict) and name not in MEASURES:
            cells[f"{name} {'/'.join(value)}"] = "/".join(map(_cell, value.values()))
        elif name not in MEASURES:
            is_share = name in FRACTIONS and value is not None
            cells[name] = f"{value:.1%}" if is_share else _cell(value)
    for name, us in row.get("us", {}).items():
        cells[f"{name} us"] = "-" if us is None else f"{us:.1f}"
    for name, value in figures.items():
        cells[name] = f"{value:.0%}" if name in FRACTIONS else f"{value:.4g}"
    return cells


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        form = ".1e" if 0 < abs(value) < 1e-3 else ".0f" if abs(value) >= 1000 else ".4g"
        return f"{value:{form}}"
    return str(value)


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
