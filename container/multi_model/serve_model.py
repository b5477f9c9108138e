"""Runs the container of one of several models, which serves on a Unix socket.

`python -m container.multi_model.serve_model PARENT URL NAME SOCKET SHARE_OF_OTHERS OVERRIDES`

PARENT is the id of the process that starts this one; this process ends when the parent ends.
SHARE_OF_OTHERS is the fraction of the GPU's memory that other models use. OVERRIDES is what
`Overrides.as_json` returns.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from container.configuration.report import report_error
from container.configuration.resolve import Configuration
from container.launch.preparation import prepare
from container.launch.supervisor import supervise
from container.model_files.directory import open_model_dir
from container.multi_model.overrides import overrides_from_json
from core.errors import ConfigurationError
from core.process.internal_arguments import internal_arguments
from core.process.processes import die_with_parent, until_stopped


def main(
    parent: str, url: str, name: str, socket: str, share_of_others: str, overrides: str
) -> int:
    """Serve until SIGTERM and return the exit code, as `serve` does."""
    die_with_parent(int(parent))
    try:
        model_dir = open_model_dir(Path(url))
        configuration = overrides_from_json(overrides).load(model_dir, os.environ)
        configuration = with_gpu_share_of_others(configuration, float(share_of_others))
        prepared = prepare(configuration, model_dir)
        return supervise(configuration, prepared, 0, socket=Path(socket), name=name)
    except ConfigurationError as error:
        return report_error(error)


def with_gpu_share_of_others(configuration: Configuration, share: float) -> Configuration:
    """Return the configuration for a GPU on which other models use this share of the memory.

    An engine counts all used memory of its GPU, including that of other processes, against
    option.gpu_memory_utilization. So the share of the others is added to this option.
    """
    if not share:
        return configuration
    own_share = configuration.options.memory.gpu_memory_utilization
    note = (
        f"option.gpu_memory_utilization={own_share:g} of this model is added to {share:g} for the "
        "other models on its GPU"
    )
    return dataclasses.replace(
        configuration,
        options=configuration.options.changed(gpu_memory_utilization=min(1.0, own_share + share)),
        warnings=(*configuration.warnings, note),
    )


if __name__ == "__main__":
    description = "The container of one of several models. The process that has the port starts it."
    form = "PARENT:int URL NAME SOCKET SHARE_OF_OTHERS:float OVERRIDES"
    arguments = internal_arguments("container.multi_model.serve_model", description, form)
    sys.exit(until_stopped(lambda: main(*arguments)))
