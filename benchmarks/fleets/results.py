"""The file with a study's results, from which a later run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fleets.study import Known, Row


class Results:
    """A JSON file that is complete after each fleet, however the run ends."""

    def __init__(self, path: Path, settings: Mapping[str, str]) -> None:
        """settings: what the rates depend on; all rows of the file have the same.

        Raises OSError if there is a file that cannot be read, and ValueError if it has results of
        other settings or something else.
        """
        self._path = path
        self._settings = dict(settings)
        self._rows: list[dict[str, Any]] = self._read() if path.exists() else []

    def known(self) -> Known:
        """Return the rates of all rows."""
        return {_fleet(row): row["rates"] for row in self._rows}

    def add(self, row: Row) -> None:
        """Write a row, in place of that of the same fleet."""
        fields = asdict(row)
        self._rows = [old for old in self._rows if _fleet(old) != _fleet(fields)] + [fields]
        found = {"simulation": True, "settings": self._settings, "rows": self._rows}
        unfinished = self._path.with_name(f"{self._path.name}.unfinished")
        unfinished.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(unfinished, self._path)

    def _read(self) -> list[dict[str, Any]]:
        try:
            found = json.loads(self._path.read_text())
            settings, rows = found["settings"], found["rows"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"--json {self._path}: exists and has no results of fleets; name another file"
            ) from None
        if settings != self._settings:
            raise ValueError(
                f"--json {self._path}: has results of {_text(settings)}, but these are "
                f"{_text(self._settings)}; name another file"
            )
        return rows


def _fleet(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["machine"], row["num_machines"], row["routing"]


def _text(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
