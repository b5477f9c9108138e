"""Runs this machine's ranks of a model whose rank 0 is on another machine (option.nodes)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from container.launch.children import Child
from core.configuration.layout import layout_here, quantity
from core.configuration.meeting_point import meeting_point
from core.configuration.options import Options
from core.errors import ConfigurationError
from core.process.logs import configure_logs
from core.process.names import python_command
from core.process.processes import note_stop_signals

logger = logging.getLogger(__name__)

COMMAND = python_command("engine.follow")
PAUSE_S = 1.0
"""Seconds between two starts of a rank, because a rank may fail at once."""
_POLL_INTERVAL_S = 0.1


def join(
    options: Options,
    model_dir: Path,
    variables: Mapping[str, str],
    command: Sequence[str] = COMMAND,
) -> int:
    """Run ranks until a signal arrives. A rank that ends is started again, for the next engine.

    model_dir: an absolute path. Its symbolic links are followed again for each new engine.
    variables: the environment.
    Return the exit code: 0 after a signal, else the exit code of a rank that rank 0 refused.

    Raises ConfigurationError if the options are for one machine, or the address or key is missing.
    """
    if options.nodes == 1:
        raise ConfigurationError(
            "option.nodes=1: the model is on one machine; set the option to the number of machines"
        )
    layout = layout_here(options, variables)
    place = meeting_point(options, variables)
    configure_logs(options.log_format, options.log_level, "")
    stop_signals = note_stop_signals()
    count = quantity(layout.num_local_ranks, "rank")
    print(f"{count} of {layout.num_ranks} on this machine; rank 0 is at {place}", flush=True)

    def start(index: int) -> Child:
        arguments = [*command, "--join", str(place), str(model_dir), str(os.getpid())]
        rank_variables = layout.joined_rank_variables(index, variables)
        return Child(f"rank process {index}", arguments, variables=rank_variables)

    children = [start(index) for index in range(layout.num_local_ranks)]
    try:
        while not stop_signals:
            time.sleep(_POLL_INTERVAL_S)
            ended = [index for index, child in enumerate(children) if child.exit_code is not None]
            for index in ended:
                logger.info("%s %s", children[index].name, children[index].describe_exit())
                if children[index].exit_code == ConfigurationError.exit_code:
                    return ConfigurationError.exit_code
            if ended:
                time.sleep(PAUSE_S)
                for index in ended:
                    children[index] = start(index)
    finally:
        for child in children:
            child.kill()
    return 0
