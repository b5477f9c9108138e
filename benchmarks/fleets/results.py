"""The file with a study's results. A later run reads it and skips what is done."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.fleets.study import FleetRow, Known


class Results:
    """A JSON file with a row for each simulated fleet, valid even if the run is interrupted."""

    def __init__(self, path: Path, settings: Mapping[str, str]) -> None:
        """settings: options that the rates depend on. They apply to all rows of the file.

        Raises OSError if the file exists and cannot be read, and ValueError if it is not a file of
        results or if its settings differ.
        """
        self._path = path
        self._settings = dict(settings)
        self._rows: list[dict[str, Any]] = self._read() if path.exists() else []

    def known(self) -> Known:
        """Return the rates of all rows."""
        return {_fleet(row): row["rates"] for row in self._rows}

    def add(self, row: FleetRow) -> None:
        """Write a row. It replaces an earlier row of the same fleet."""
        fields = asdict(row)
        self._rows = [old for old in self._rows if _fleet(old) != _fleet(fields)] + [fields]
        document = {"simulation": True, "settings": self._settings, "rows": self._rows}
        unfinished = self._path.with_name(f".{self._path.name}.{uuid4().hex}")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(unfinished, self._path)

    def _read(self) -> list[dict[str, Any]]:
        try:
            document = json.loads(self._path.read_text())
            settings, rows = document["settings"], document["rows"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"--json {self._path}: exists, but is not a file of results; name another file"
            ) from None
        if settings != self._settings:
            raise ValueError(
                f"--json {self._path}: has results with {_text(settings)}, but this run has "
                f"{_text(self._settings)}; name another file"
            )
        return rows


def _fleet(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["machine"], row["num_machines"], row["routing"]


def _text(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
