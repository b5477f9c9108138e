"""Serves several fake models: `python -m tests.container.multi_model.run_models PORT [STORE]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from container.configuration.report import report_error
from container.multi_model.server import serve_models
from container.multi_model.store import store_entries
from core.errors import ConfigurationError
from tests.container.multi_model.fronts import FAKE


def main(port: str, *stores: str) -> int:
    """Return the exit code."""
    try:
        entries = store_entries(Path(stores[0])) if stores else {}
        return serve_models(entries, int(port), os.environ, FAKE)
    except ConfigurationError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
