"""Serves with a fake engine: `python -m tests.container.launch.run_supervisor MODEL_DIR PORT MODE`.

It reads OPTION_* and SERVING_* from the environment as usual.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from container.configuration.resolve import load_configuration
from container.launch.preparation import PreparedModel
from container.launch.supervisor import Commands, supervise
from core.configuration.task import Task


def main(model_dir: str, port: str, mode: str) -> int:
    """Return the exit code of the supervisor."""
    commands = Commands(engine=(sys.executable, "-m", "tests.container.fake_engine", mode))
    configuration = load_configuration(None, os.environ)
    return supervise(configuration, PreparedModel(Path(model_dir), Task()), int(port), commands)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
